"""Engines: where the pieces of a job are computed.

``base.py`` defines what an engine is; ``local.py`` uses processes of this machine, ``ranks.py``
those that torchrun started, and ``ray.py`` a Ray cluster. ``JobPart`` in ``base.py`` is one of
several independent commands.
"""

from __future__ import annotations

from hardneg.core.errors import argument_error
from hardneg.mining.engines.base import Engine, JobPart
from hardneg.mining.engines.local import Local
from hardneg.mining.engines.ranks import join_ranks
from hardneg.mining.engines.ray import Ray
from hardneg.mining.options import MineOptions


def engine_of(options: MineOptions) -> Engine:
    """Return the engine that the options name; under torchrun, its ranks.

    Raises:
        ArgumentError: If ``--part``, ``--merge``, ``--engine`` and ``--workers`` contradict each other.
    """
    if options.part is not None and options.merge:
        raise argument_error("mine", "a part or the merge after all parts", "part", options.part)
    if options.part is not None:
        if options.engine != "local" or options.workers > 1:
            fix = "leave --engine and --workers out"
            raise argument_error("mine", "one process for a part", "part", options.part, fix)
        return JobPart.parse(options.part)
    if options.engine == "ray":
        return Ray(options.ray_address, options.workers)
    ranks = join_ranks()
    if ranks.size > 1:
        if options.workers > 1:
            raise argument_error("mine", "one worker for each rank of torchrun", "workers", options.workers)
        return ranks
    return Local(options.workers, options.device)
