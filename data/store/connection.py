"""One object service, asked again until it answers or the patience ends."""

import os
from collections.abc import Callable
from typing import TypeVar

from fsspec import AbstractFileSystem

from data.store.retries import Patience, retrying
from data.store.service import service_of
from data.store.urls import Place

T = TypeVar("T")


class Connection:
    """Below bucket/prefix of one service, from any process and thread.

    Attributes:
        service: what differs between services.
    Raises:
        InputError: the package for this service is not installed.
    """

    def __init__(self, place: Place, patience: Patience) -> None:
        self.url, self.base = place.url, place.base
        self.service = service_of(place.protocol, place.url)
        self._patience = patience
        # By process: connections and fsspec's loop do not survive a fork. A parent's entry stays
        # referred to in its children, which must not close the connections they share.
        self._connected: dict[int, AbstractFileSystem] = {}

    def ask(self, name: str, operation: Callable[[AbstractFileSystem], T]) -> T:
        """What the operation returns; its errors are those of `Store`, free of secrets."""
        where = f"{self.url}/{name}" if name else self.url
        try:
            return retrying(
                lambda: operation(self._file_system()),
                what=where,
                heals=self.service.heals,
                patience=self._patience,
            )
        except Exception as error:
            raise self.service.told(error, self.url, where) from None

    def path(self, name: str) -> str:
        return f"{self.base}/{name}" if name else self.base

    def _file_system(self) -> AbstractFileSystem:
        pid = os.getpid()
        if pid not in self._connected:
            self._connected.setdefault(pid, self.service.connect(self._patience))
        return self._connected[pid]
