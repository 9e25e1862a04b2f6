"""What type checkers and editors see of the face: `__init__.pyi`, written from the table in `ensemble_ray/__init__.py`.

After a change of the table: `python -m tests.architecture.face`.
"""

import ensemble_ray
from tests.architecture.project import ROOT

STUB = ROOT / "ensemble_ray" / "__init__.pyi"
_HEAD = "# Written by `python -m tests.architecture.face` from the table in `__init__.py`.\n"


def stub_text() -> str:
    """Return the stub of the face: each public name, imported from the module that has it."""
    homes = {**dict.fromkeys(ensemble_ray.MODULES, "ensemble_ray"), **ensemble_ray.MODULE_OF}
    # In the order of the formatter: by module, classes before functions.
    ordered = sorted(homes, key=lambda name: (homes[name], name[0].islower(), name.lower()))
    imports = "".join(f"from {homes[name]} import {name} as {name}\n" for name in ordered)
    names = sorted(
        ensemble_ray.__all__, key=lambda name: not name.isupper()
    )  # as the linter wants: those in capitals first
    listed = "".join(f'    "{name}",\n' for name in names)
    return f"{_HEAD}{imports}\nMODULES: tuple[str, ...]\nMODULE_OF: dict[str, str]\n\n__all__ = [\n{listed}]\n"


if __name__ == "__main__":
    STUB.write_text(stub_text(), encoding="utf-8")
