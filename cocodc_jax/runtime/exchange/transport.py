"""Which way messages take between regions: resolved once to a route.

A route is an object with `send`, which hands a fragment's message out and never waits,
and with the shapes of what will arrive:

- `in_program.InProgram`: the program that sends takes the mean as well;
- `outer_mesh.OnOuterMesh`: a second program crosses between hosts, beside the steps.
"""

from __future__ import annotations

import dataclasses

from cocodc_jax.runtime.exchange.collectives import ALL_REDUCES
from cocodc_jax.runtime.exchange.in_program import InProgram
from cocodc_jax.runtime.exchange.outer_mesh import OnOuterMesh
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.sync.method import Method

EXCHANGES = ("auto", "program", "outer")

Route = InProgram | OnOuterMesh


@dataclasses.dataclass(frozen=True)
class Transport:
    """How messages cross regions.

    Attributes:
      exchange: "program" averages messages in a program of the inner mesh, "outer" on
        the outer mesh, beside the inner steps; "auto" is the latter where there are
        several processes and the method allows it.
      all_reduce: how they cross between processes, where this package chooses: "direct"
        or "ring", see `collectives.py`.
      outer_channels: outer meshes side by side; fragment k crosses on number
        k mod outer_channels, so that as many can be on their way at once.
    """

    exchange: str = "auto"
    all_reduce: str = "direct"
    outer_channels: int = 1

    def __post_init__(self):
        """Check the names and the number.

        Raises:
          ValueError: naming the field, its value and what would be right.
        """
        if self.exchange not in EXCHANGES:
            raise ValueError(
                f"exchange={self.exchange!r} is unknown; use one of {EXCHANGES}"
            )
        if self.all_reduce not in ALL_REDUCES:
            raise ValueError(
                f"all_reduce={self.all_reduce!r} is unknown; use one of {ALL_REDUCES}"
            )
        if self.outer_channels < 1:
            raise ValueError(f"outer_channels={self.outer_channels} must be at least 1")

    def resolve(self, method: Method, num_processes: int) -> str:
        """Return "program" or "outer".

        Args:
          method: whose messages cross.
          num_processes: that the regions live in.

        Raises:
          ValueError: for what the method cannot have.
        """
        crosses_outside = self._crosses_outside(method, num_processes)
        if self.outer_channels == 1:
            return "outer" if crosses_outside else "program"
        if method.sync is None or not crosses_outside:
            raise ValueError(
                f"outer_channels={self.outer_channels} has no meaning for method="
                f"{method.name!r} with exchange={self.exchange!r} and processes="
                f"{num_processes}: its messages do not cross on the outer mesh; use 1"
            )
        if self.outer_channels > method.num_fragments:
            raise ValueError(
                f"outer_channels={self.outer_channels} must be at most num_fragments="
                f"{method.num_fragments}: a fragment crosses on one channel"
            )
        return "outer"

    def _crosses_outside(self, method: Method, num_processes: int) -> bool:
        why = method.sync.only_in_program if method.sync else None
        is_measured = method.sync is not None and method.sync.schedule.is_measured
        if is_measured and (why or self.exchange == "program"):
            raise ValueError(
                f"exchange={self.exchange!r} is not possible for method="
                f"{method.name!r} with delay_steps='auto' or syncs_per_interval="
                "'auto': what regions measure goes with messages on the outer mesh"
                f"{why and f', but {why}' or ''}; use numbers"
            )
        if self.exchange == "outer" and why:
            raise ValueError(
                f"exchange='outer' is not possible for method={method.name!r}: {why}; "
                "use 'program'"
            )
        if self.exchange == "auto":
            return is_measured or (num_processes > 1 and why is None)
        return self.exchange == "outer"

    def route(self, setting: Setting, kind: str) -> Route:
        """Make the route that `resolve` named."""
        if kind == "program":
            return InProgram(setting)
        return OnOuterMesh(setting, self.all_reduce)
