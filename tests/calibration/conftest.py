"""Makes the helpers beside the tests importable (import mode importlib puts no folder on sys.path)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
