"""Choose how messages cross regions, once, as an `Exchange`.

- `in_program.InProgram`: the program that sends also averages;
- `between_hosts.OnOuterMesh`: a second program averages between hosts, concurrently
  with the inner steps;
- `elastic_exchange.ElasticExchange`: every region is a separate run, which may die and
  come back; threads carry messages from host to host.
"""

import dataclasses

import jax
from jax.sharding import Mesh

from cocodc_jax.elastic.place import Place
from cocodc_jax.engine.between_hosts import OnOuterMesh
from cocodc_jax.engine.collectives import ALL_REDUCES
from cocodc_jax.engine.crossing import Exchange, InProgram, SyncSpec
from cocodc_jax.engine.elastic_exchange import ElasticExchange
from cocodc_jax.engine.mesh import REGION, is_cpu
from cocodc_jax.fields import check_choices, check_least
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.model_state import ModelState
from cocodc_jax.sync.needs import HALFWAY, MEASURED_NOW
from cocodc_jax.sync.outer import SharedOuter
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules.base import most_in_flight

EXCHANGES = ("auto", "program", "outer", "elastic")
OVERLAPS = ("auto", "yes", "no")


@dataclasses.dataclass(frozen=True)
class Transport:
    """How messages cross regions.

    Attributes:
      exchange: "program" averages messages in a program of the inner mesh; "outer" on
        the outer mesh, concurrently with the inner steps; "elastic" makes every
        region a separate run; "auto" is "outer" if the schedule is measured, or if
        there are several processes and the method allows it, else "program".
      all_reduce: algorithm between processes, where this package chooses: "direct" or
        "ring", see `collectives.py`.
      outer_channels: number of outer meshes; fragment k uses number k mod
        outer_channels, so that as many can be in flight at once.
      place: this process's region, for "elastic".
      overlap: whether syncs and inner steps share a program, so that messages
        overlap with computation, see `engine/segment.py`: "yes", "no", or "auto",
        which is yes if regions are on several accelerators and messages cross in the
        program.
    """

    exchange: str = "auto"
    all_reduce: str = "direct"
    outer_channels: int = 1
    place: Place | None = None
    overlap: str = "auto"

    def __post_init__(self):
        check_choices(
            self, exchange=EXCHANGES, all_reduce=ALL_REDUCES, overlap=OVERLAPS
        )
        check_least(self, 1, "outer_channels")

        if self.place is not None and self.exchange != "elastic":
            raise ValueError(f"place has no meaning for exchange={self.exchange!r}")
        if self.exchange == "elastic" and self.outer_channels > 1:
            raise ValueError(
                f"outer_channels={self.outer_channels} has no meaning for exchange="
                "'elastic', where every message has a thread of its own; use 1"
            )

    def own(self, regions: Regions, method: Method) -> Regions:
        """Return the regions that this program trains; check elastic ones."""
        if self.exchange != "elastic":
            return regions

        if self.place is None:
            raise ValueError(
                "exchange='elastic' needs to know which region this is: place="
            )

        if self.place.num_regions != regions.num:
            raise ValueError(
                f"regions={regions.num} but region_addresses has "
                f"{self.place.num_regions}; one for each"
            )

        if len({*regions.step_times}) > 1 or len({*regions.batch_sizes}) > 1:
            raise ValueError(
                f"step_times={regions.step_times} and batch_sizes="
                f"{regions.batch_sizes} must be equal for exchange='elastic'"
            )
        reason = _not_elastic(method)
        if reason is not None:
            raise ValueError(
                f"exchange='elastic' is not possible for method={method.name!r}: "
                f"{reason}; use 'auto'"
            )

        assert method.sync is not None
        self._check_behind(method, self.place)
        if self.place.late_mean == "merge" and HALFWAY in method.sync.copies:
            raise ValueError(
                f"late_mean='merge' is not possible for method={method.name!r}: its "
                "merge looks at where a region was halfway, of a delay that is known "
                "before; use late_mean='wait', or another curvature"
            )
        return Regions(regions.step_times[:1], regions.batch_sizes[:1])

    def _check_behind(self, method: Method, place: Place) -> None:
        """Refuse a bound on decided syncs that regions in step with all may exceed."""
        schedule = method.schedule
        assert schedule is not None
        most = place.timing.max_behind
        num_steps = 4 * (schedule.sync_interval + schedule.delay_steps)
        least = most_in_flight(schedule, num_steps)
        if place.late_mean == "merge":  # A fragment is in flight until it comes.
            least = max(least, method.num_fragments)

        if most < least and place.num_regions > 1:
            raise ValueError(
                f"max_behind_syncs={most} must be at least {least}: so many syncs of "
                f"method={method.name!r} are in flight at once, so a region that "
                "joins would be too far behind before it has begun"
            )

    def check_model_state(self, model_state: ModelState) -> None:
        """Refuse a model state that elastic regions would have to average."""
        if self.exchange == "elastic" and model_state.averaged_bytes:
            raise ValueError(
                "exchange='elastic' does not average a model_state over regions; use "
                "ModelState(init, average=False), or exchange='outer'"
            )

    def own_keys(self, keys: jax.Array) -> jax.Array:
        """Select the keys of this program's regions from all regions' keys."""
        if self.exchange != "elastic" or self.place is None:
            return keys
        return keys[self.place.region][None]

    def resolve(self, method: Method, num_processes: int) -> str:
        """Return "program", "outer" or "elastic"; refuse what a method cannot have."""
        if self.exchange == "elastic":
            return "elastic"

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
        reason = method.sync.only_in_program if method.sync else None
        is_measured = method.sync is not None and method.sync.schedule.is_measured
        if is_measured and (reason or self.exchange == "program"):
            but = f", but {reason}" if reason else ""
            raise ValueError(
                f"exchange={self.exchange!r} is not possible for method="
                f"{method.name!r} with delay_steps='auto' or syncs_per_interval="
                "'auto': what regions measure goes with messages on the outer mesh"
                f"{but}; use numbers"
            )
        if self.exchange == "outer" and reason:
            raise ValueError(
                f"exchange='outer' is not possible for method={method.name!r}: "
                f"{reason}; use 'program'"
            )

        if self.exchange == "auto":
            return is_measured or (num_processes > 1 and reason is None)
        return self.exchange == "outer"

    def overlaps(self, method: Method, mesh: Mesh, kind: str) -> bool:
        """Return whether syncs and inner steps share a program; `kind` is resolved.

        Raises ValueError if requested but unsupported.
        """
        reason = None
        if method.sync is None or not isinstance(method.sync.outer, SharedOuter):
            reason = f"method={method.name!r} has no outer model that regions share"
        elif kind != "program":
            reason = f"messages cross by exchange={kind!r}; use 'program'"
        elif mesh.shape[REGION] == 1:
            reason = (
                "all regions share the same devices, and nothing crosses; use 'auto'"
            )

        if reason is not None:
            if self.overlap == "yes":
                raise ValueError(f"overlap='yes' is not possible: {reason}")
            return False
        if self.overlap == "auto":
            return not is_cpu(mesh)
        return self.overlap == "yes"

    def exchange_of(self, spec: SyncSpec, kind: str, overlap: bool = False) -> Exchange:
        """Make the exchange that `resolve` and `overlaps` chose."""
        if kind == "program":
            return InProgram(spec, in_one_buffer=overlap)
        if kind == "elastic":
            assert self.place is not None
            return ElasticExchange(spec, self.place)
        return OnOuterMesh(spec, self.all_reduce)


def _not_elastic(method: Method) -> str | None:
    """Return why a method is not for elastic regions, None if it is."""
    sync = method.sync
    if method.per_step is not None:
        return "its regions exchange at every step"
    if sync is None:
        return "it exchanges nothing"

    if not isinstance(sync.outer, SharedOuter):
        return "each region has outer parameters of its own"
    if sync.only_in_program:
        return sync.only_in_program
    if sync.moments:
        return "it averages the inner optimizer's state too"

    if sync.schedule.is_by_region:
        return "its regions come one by one"
    if getattr(sync.schedule, "participating", None) is not None:
        return "a part of its regions takes part, which each would be by itself"
    if sync.schedule.is_measured:
        return "delay_steps='auto' and syncs_per_interval='auto' follow all regions"
    if sync.schedule.needs & MEASURED_NOW:
        return "its schedule looks at all regions' parameters"

    return None
