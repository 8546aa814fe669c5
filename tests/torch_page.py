"""Runs the code of docs/integration.md as it stands there, then the example: ``torchrun -m tests.torch_page``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from experiments import serving

PAGE = Path(__file__).resolve().parents[1] / "docs" / "integration.md"


def main() -> int:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["reducer"].disabled, "it is closed at the end"
    assert bool((names["y"] == 2).all()), names["y"]
    assert bool((names["x"] == 1).all()), "the other way was taken"
    return serving.main(["--device", "cpu"])


if __name__ == "__main__":
    raise SystemExit(main())
