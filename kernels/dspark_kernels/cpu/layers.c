/* All layers of a pass over a slotted cache in one call: the kernels that the decoder's own body calls, in its order, so
 * its bits. What is saved is the way through Python and torch between them, a sixth of the time of a pass with one row.
 *
 * residual, normed: [n, h], overwritten by those behind the last layer. Keys and values of row r go to cache row rows[r].
 */
#include "vec.h"

int dspark_linear(void *out, const void *x, const void *weight, const void *packed, const void *bias, int64_t n,
                  int64_t i, int64_t o, int dtype, int out_dtype, int threads);
void dspark_rms_norm(void *out, const void *x, const void *w, int64_t n, int64_t heads, int64_t h, int64_t stride,
                     float eps, int dtype, int threads);
void dspark_add_rms_norm(void *out, void *sum, const void *x, const void *residual, const void *w, int64_t n, int64_t h,
                         float eps, int dtype, int threads);
void dspark_rotary(void *out, const void *x, const float *cos, const float *sin, int64_t n, int64_t heads, int64_t half,
                   int64_t stride, int dtype, int threads);
void dspark_silu_mul(void *out, const void *x, int64_t n, int64_t i, int dtype, int threads);
int dspark_attention(void *out, const void *q, const void *k, const void *v, const int64_t *begin, const int64_t *end,
                     const void *k2, const void *v2, const int64_t *begin2, const int64_t *end2, int64_t n, int64_t t,
                     int64_t t2, int64_t hq, int64_t hkv, int64_t d, float scale, int dtype, int threads);

typedef struct {
    const void *weight, *packed, *bias;
} Matrix;

/* As dspark/ops/cpu/layers.py lays it out, 64-bit words; NULL where the family has none. tap: where the residual behind
 * the layer is copied to. */
typedef struct {
    Matrix qkv, output, gate_up, down;
    const void *q_norm, *k_norm, *post_norm, *next_norm;
    char *k, *v;
    const int64_t *begin;
    char *tap;
} Layer;

typedef struct {
    int64_t n, h, hq, hkv, d, i, capacity, tap_row; /* tap_row: elements from a row of what is tapped to the next */
} Sizes;

EXPORT int64_t dspark_layers_words(void) { return sizeof(Layer) / 8; }

static int64_t workspace(const Sizes *s, int64_t *at) {
    int64_t widths[] = {(s->hq + 2 * s->hkv) * s->d, s->hq * s->d, s->hkv * s->d, s->hq * s->d, s->h, 2 * s->i, s->i};
    int64_t total = 0;
    for (int j = 0; j < 7; j++) {
        at[j] = total;
        total += (s->n * widths[j] + 31) / 32 * 32;
    }
    return total;
}

/* Elements of scratch that a pass needs. */
EXPORT int64_t dspark_layers_scratch(const int64_t *sizes) {
    int64_t at[7];
    return workspace((const Sizes *)sizes, at);
}

/* One head matrix of the flat qkv rows: normalised where there is a norm, then turned. */
static void place_heads(char *out, char *between, const char *x, const void *norm, int64_t heads, int64_t stride,
                        const Sizes *s, const float *cos, const float *sin, float eps, int dtype, int threads) {
    if (norm) {
        dspark_rms_norm(between, x, norm, s->n, heads, s->d, stride, eps, dtype, threads);
        x = between;
        stride = heads * s->d;
    }
    dspark_rotary(out, x, cos, sin, s->n, heads, s->d / 2, stride, dtype, threads);
}

static int run_layer(const Layer *l, const Sizes *s, char *normed, char *residual, const float *cos, const float *sin,
                     const int64_t *rows, const int64_t *end, char *const *buffer, float eps, float scale, int dtype,
                     int threads) {
    char *qkv = buffer[0], *q = buffer[1], *k = buffer[2], *mixed = buffer[3], *proj = buffer[4], *wide = buffer[5],
         *inner = buffer[6];
    int64_t size = dtype == F32 ? 4 : 2, stride = (s->hq + 2 * s->hkv) * s->d, row = s->hkv * s->d * size;
    int status = dspark_linear(qkv, normed, l->qkv.weight, l->qkv.packed, l->qkv.bias, s->n, s->h, stride, dtype, dtype,
                               threads);
    /* mixed is free until attention writes it: room for what lies between norm and rotation */
    place_heads(k, mixed, qkv + s->hq * s->d * size, l->k_norm, s->hkv, stride, s, cos, sin, eps, dtype, threads);
    place_heads(q, mixed, qkv, l->q_norm, s->hq, stride, s, cos, sin, eps, dtype, threads);
    for (int64_t r = 0; r < s->n; r++) {
        memcpy(l->k + rows[r] * row, k + r * row, row);
        memcpy(l->v + rows[r] * row, qkv + (r * stride + (s->hq + s->hkv) * s->d) * size, row);
    }
    status |= dspark_attention(mixed, q, l->k, l->v, l->begin, end, NULL, NULL, NULL, NULL, s->n, s->capacity, 0, s->hq,
                               s->hkv, s->d, scale, dtype, threads);
    status |= dspark_linear(proj, mixed, l->output.weight, l->output.packed, l->output.bias, s->n, s->hq * s->d, s->h,
                            dtype, dtype, threads);
    dspark_add_rms_norm(normed, residual, proj, residual, l->post_norm, s->n, s->h, eps, dtype, threads);
    status |= dspark_linear(wide, normed, l->gate_up.weight, l->gate_up.packed, l->gate_up.bias, s->n, s->h, 2 * s->i,
                            dtype, dtype, threads);
    dspark_silu_mul(inner, wide, s->n, s->i, dtype, threads);
    status |= dspark_linear(proj, inner, l->down.weight, l->down.packed, l->down.bias, s->n, s->i, s->h, dtype, dtype,
                            threads);
    dspark_add_rms_norm(normed, residual, proj, residual, l->next_norm, s->n, s->h, eps, dtype, threads);
    for (int64_t r = 0; l->tap && r < s->n; r++)
        memcpy(l->tap + r * s->tap_row * size, residual + r * s->h * size, s->h * size);
    return status;
}

/* Returns the kernels' status bits; after a non-zero one nothing that was written counts, but no row of the cache other
 * than rows[...] was touched. Row indices outside [0, capacity) are status 4, before anything is written. */
EXPORT int dspark_layers(const void *layers, int64_t count, const int64_t *sizes, void *normed, void *residual,
                         const float *cos, const float *sin, const int64_t *rows, const int64_t *end, void *scratch,
                         float eps, float scale, int dtype, int threads) {
    const Sizes *s = (const Sizes *)sizes;
    int64_t at[7], size = dtype == F32 ? 4 : 2;
    char *buffer[7];
    workspace(s, at);
    for (int j = 0; j < 7; j++) buffer[j] = (char *)scratch + at[j] * size;
    for (int64_t r = 0; r < s->n; r++)
        if (rows[r] < 0 || rows[r] >= s->capacity) return 4;
    for (int64_t l = 0; l < count; l++) {
        int status = run_layer((const Layer *)layers + l, s, normed, residual, cos, sin, rows, end, buffer, eps, scale,
                               dtype, threads);
        if (status) return status;
    }
    return 0;
}
