"""CPU kernels whose results are a function of each row alone, and their plain torch references.

``cpu/`` holds the C sources (one file per family, its maths on top), ``build.py`` compiles them once per machine,
``reference.py`` repeats every kernel in plain tensor code. Imports nothing of dspark. GPU kernels are not here yet.
"""

from __future__ import annotations

from dspark_kernels.build import compiler_version, cpu_flags, cpu_model, library, source_hash

__all__ = ["compiler_version", "cpu_flags", "cpu_model", "library", "source_hash"]
