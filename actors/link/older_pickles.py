"""Submissions of builds in which structs were dataclasses with slots."""

# mypy: disable-error-code="attr-defined,misc,name-defined,no-untyped-call"
# pyright: basic

from __future__ import annotations

import pickle
from typing import ClassVar

from msgspec import Struct, structs


class _Unbuilt:
    def __init__(self, kind: type[Struct]) -> None:
        self.kind = kind


class OlderUnpickler(pickle._Unpickler):  # noqa: SLF001  the one written in Python; the other cannot be extended
    """Such a dataclass was pickled as an empty object and the list of its values."""

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)  # noqa: SLF001

    def load_newobj(self) -> None:
        if isinstance(kind := self.stack[-2], type) and issubclass(kind, Struct):
            self.stack[-2:] = [_Unbuilt(kind)]
        else:
            super().load_newobj()

    def load_build(self) -> None:
        unbuilt = self.stack[-2]
        if not isinstance(unbuilt, _Unbuilt):
            super().load_build()
            return
        names = [each.name for each in structs.fields(unbuilt.kind)]
        built = unbuilt.kind(**dict(zip(names, self.stack.pop(), strict=False)))
        self.stack[-1] = built
        self.memo.update({at: built for at, each in self.memo.items() if each is unbuilt})

    dispatch[pickle.NEWOBJ[0]] = load_newobj  # type: ignore[assignment]
    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]
