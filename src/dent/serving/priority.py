"""Who gets a core first: models, before those who talk to clients.

When a batch is answered, all its clients ask again at once; without priorities, a tenth of the time of
the model that works at the next one is lost to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray


def yielding() -> Callable[..., None]:
    """A function that has the process which calls it take what others leave.

    It is made here, for Ray sends such functions as they are: others by their module, and dent with all
    of torch would be loaded by a proxy.
    """

    def give_way(*_: Any) -> None:
        import os
        from contextlib import suppress
        from pathlib import Path

        lowest = 19
        tasks = Path("/proc/self/task")  # on Linux, threads have priorities of their own
        if tasks.exists():
            for thread in tasks.iterdir():
                with suppress(OSError):  # it has ended
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), lowest)
        else:
            os.nice(lowest)

    return give_way


def lower_proxies() -> None:
    """Have Ray Serve's proxies yield."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("SERVE_PROXY_ACTOR"):
            proxy = ray.get_actor(actor["name"], actor["namespace"])
            ray.get(proxy.__ray_call__.remote(yielding()))
