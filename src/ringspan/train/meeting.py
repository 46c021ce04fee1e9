"""Where the ranks of one start meet: torchrun's store, in a part of it that no earlier start has written to.

torchrun keeps one store over all its restarts, and gloo's addresses of dead ranks are still in it: a rank that comes
early would read them, and wait for nobody. How often torchrun has restarted does not tell starts apart, since every
machine counts for itself. So rank 0 draws a name for the start, and tells it to each rank in answer to a word that the
rank has drawn itself: an old answer answers nobody who is alive.
"""

from __future__ import annotations

import datetime
import secrets
import time

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ringspan.train.errors import RunError

_LOOK = 0.02  # seconds between two looks for ranks that have not come yet


def meet(patience: float) -> tuple[Store, int, int]:
    """A store that only the ranks of this start write to, this rank, and how many there are."""
    timeout = datetime.timedelta(seconds=patience)
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(agree_on_name(store, rank, world, patience), store), rank, world


def agree_on_name(store: Store, rank: int, world: int, patience: float) -> str:
    """A name for this start that all its ranks know, and no earlier start has known."""
    mine = secrets.token_hex(8)
    if rank == 0:
        _tell_all(store, mine, set(range(1, world)), patience)
        return mine
    store.set(f"ringspan/comes/{rank}", mine)
    name: str = store.get(f"ringspan/name/{mine}").decode()  # waits
    store.set(f"ringspan/heard/{name}/{rank}", "yes")
    return name


def _tell_all(store: Store, name: str, missing: set[int], patience: float) -> None:
    start = time.monotonic()
    while missing:
        for rank in sorted(missing):
            if store.check([f"ringspan/heard/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"ringspan/comes/{rank}"]):  # perhaps of an earlier start: then nobody listens
                store.set(f"ringspan/name/{store.get(f'ringspan/comes/{rank}').decode()}", name)
        if missing and time.monotonic() - start > patience:
            raise RunError(f"ranks {sorted(missing)} did not come within {patience:g} s (--patience)")
        time.sleep(_LOOK)
