"""Who may have which name: a name is one extractor's, until that is deleted or its build fails."""

from __future__ import annotations

from service.engine.extractors.records import Records
from service.engine.extractors.sharing import Sharing
from service.engine.extractors.store import is_id
from service.engine.record import ExtractorRecord
from service.problems import NameTaken


class Naming:
    """Claims names for extractors. For one event loop.

    Args:
        records: the extractors known here.
        sharing: the store, if there is one.
    """

    def __init__(self, records: Records, sharing: Sharing | None) -> None:
        self._records = records
        self._sharing = sharing

    async def check(self, name: str, record: ExtractorRecord) -> None:
        """Claim ``name`` for ``record``; extractors whose build failed give up their names.

        Raises:
            NameTaken: it is another's.
        """
        if self._sharing is None or not record.saved:
            self.refuse_here(name, record.id)
            return
        if is_id(name) and name != record.id and await self._sharing.get(name) is not None:
            raise _taken(name, name)
        id = await self._sharing.claim(name, record.id, self._gives_up_names)
        if id != record.id:
            raise _taken(name, id)

    def refuse_here(self, name: str, id: str) -> None:
        """Check that no extractor known here but ``id`` has ``name``.

        Raises:
            NameTaken: another has it.
        """
        owner = self._records.known(name)
        self.refuse(name, id, None if owner is None else owner.id)

    def refuse(self, name: str, id: str, owner: str | None) -> None:
        """Check that no extractor but ``id`` has ``name``.

        Raises:
            NameTaken: ``owner`` has it.
        """
        if owner is not None and owner != id and (owner == name or not self._gives_up_names(owner)):
            raise _taken(name, owner)

    def _gives_up_names(self, id: str) -> bool:
        record = self._records.get(id)
        return record is not None and record.state == "failed"


def _taken(name: str, id: str) -> NameTaken:
    return NameTaken(
        f"the name {name!r} is taken by extractor {id}; choose another name or delete that extractor",
        name=name,
        extractor=id,
    )
