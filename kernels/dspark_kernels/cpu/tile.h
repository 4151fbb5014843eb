/* The one matrix microkernel: C[M, P*NR] (+)= X[M, K] * W[K, P*NR], for M rows and P panels of NR columns.
 *
 * Every C[m, j] is a chain of K fused multiply-adds in k order, in one register lane (SUM adds it to what was there), so
 * its bits depend on row m of X and column j of W alone: not on M, P, NR, on who computes it, or on the rows beside it.
 */
#ifndef DSPARK_TILE_H
#define DSPARK_TILE_H

#include "vec.h"

#if VW == 16
#define MR 12
#define PANELS(m) ((m) <= 3 ? 4 : 1)
#else
#define MR 6
#define PANELS(m) ((m) == 1 ? 4 : (m) <= 3 ? 2 : 1)
#endif
#define MAX_PANELS 4

/* Two nudges for the register allocator; they change no value. REREAD: broadcast x again for each panel, or an
 * accumulator is spilled. KEEP: hold a weight vector in a register instead of loading it for every row. */
#define REREAD(pointer) __asm__("" : "+r"(pointer))
#if defined(__AVX512F__)
#define KEEP(vector) __asm__("" : "+v"(vector))
#elif defined(__AVX2__)
#define KEEP(vector) __asm__("" : "+x"(vector))
#else
#define KEEP(vector) (void)(vector)
#endif

/* How NR consecutive columns of one k lie in memory. PAIRED: 32-bit lane j holds bf16 column j (low half) and
 * column j + VW (high half), so one load, one shift and one mask give two vectors. DOT: 32-bit lane j holds column j at
 * k (high half) and at the k after it (low half), x likewise, and what counts as one k here is those two. */
enum { W_F32 = 0, W_PAIRED = 1, W_BF16 = 2, W_DOT = 3 };

/* What becomes of the C that is there: START overwrites it, CHAIN goes on from it, SUM adds the finished chain to it. */
enum { START = 0, CHAIN = 1, SUM = 2 };

INLINE void load_columns(const char *w, const int kind, vf *a, vf *b) {
    if (kind == W_F32 || kind == W_DOT) {
        *a = vload((const float *)w);
        *b = vload((const float *)w + VW);
    } else if (kind == W_PAIRED) {
        vu u = *(const vuu *)w;
        *a = (vf)(u << 16);
        *b = (vf)(u & 0xffff0000u);
    } else {
        *a = vload_as(w, 0, BF16);
        *b = vload_as(w, VW, BF16);
    }
}

/* x[m*xrow + k*xk]; column block of k at w + k*wk, panel p at + p*wpanel (bytes); c[m*crow + column]. */
INLINE void tile(const int M, const int P, const int kind, const int add, int64_t K, const float *x, int64_t xrow,
                 int64_t xk, const char *w, int64_t wk, int64_t wpanel, float *c, int64_t crow) {
    vf acc[MR][MAX_PANELS][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            acc[m][p][0] = add == CHAIN ? vload(c + m * crow + p * NR) : vset1(0.0f);
            acc[m][p][1] = add == CHAIN ? vload(c + m * crow + p * NR + VW) : vset1(0.0f);
        }
    for (int64_t k = 0; k < K; k++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            vf a, b;
            if (P > 1 && kind != W_F32) REREAD(x);
            load_columns(w + p * wpanel, kind, &a, &b);
            if ((kind == W_F32 || kind == W_DOT) && M > 3) {
                KEEP(a);
                KEEP(b);
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                vf xm = vset1(x[m * xrow]);
                acc[m][p][0] = kind == W_DOT ? vdot(a, xm, acc[m][p][0]) : vfma(xm, a, acc[m][p][0]);
                acc[m][p][1] = kind == W_DOT ? vdot(b, xm, acc[m][p][1]) : vfma(xm, b, acc[m][p][1]);
            }
        }
        x += xk;
        w += wk;
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            float *to = c + m * crow + p * NR;
            if (add == SUM) {
                acc[m][p][0] += vload(to);
                acc[m][p][1] += vload(to + VW);
            }
            vstore(to, acc[m][p][0]);
            vstore(to + VW, acc[m][p][1]);
        }
}

#if VW == 16
#define FOR_EACH_M(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12)
#define FOR_FEW_M(F) F(1) F(2) F(3) F(4) F(5) F(6)
#else
#define FOR_EACH_M(F) F(1) F(2) F(3) F(4) F(5) F(6)
#define FOR_FEW_M(F) F(1) F(2) F(3)
#endif

#endif
