"""Length and placement of a run: its steps, regions, devices and files."""

import dataclasses
import math
from collections.abc import Callable

from cocodc_jax.engine.collectives import ALL_REDUCES
from cocodc_jax.engine.placement import MEMORIES
from cocodc_jax.engine.region_map import HOW_MAPPED
from cocodc_jax.engine.transport import EXCHANGES, OVERLAPS, Transport
from cocodc_jax.fields import Kind, check_choices, check_least, free, of_kind, one_of
from cocodc_jax.models import StageCodec
from cocodc_jax.run.config.stage_codec import build_codec
from cocodc_jax.sync.regions import Regions
from cocodc_jax.train.hooks import Cadence
from cocodc_jax.train.spikes import SpikeWatch

# More than any system has today: a typo.
MAX_DEVICES = 2**20


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Length and placement of a run.

    Attributes:
      steps: inner steps of the full run.
      seed: of parameters, data order and dropout keys.
      init_from: folder of a Hugging Face LLaMA (config.json and model.safetensors) of
        the same shape, from whose parameters all regions start; empty initializes them.
      regions: regions that train, M.
      step_times: time of one inner step of each region, in steps of the fastest, as
        1,1,2,4; empty is regions of equal speed.
      batch_sizes: sequences per step of each region, as 8,8,4,4, each a divisor of
        batch_per_region; empty is batch_per_region for all.
      devices: number of devices for the regions; 0 uses as many as the regions can use.
      local_regions: how a device with several regions computes them: batched, all at
        once; in_turn, one after another; auto is batched on accelerators, and on a CPU
        for small models.
      data_axis: devices along each region's data axis (batch and FSDP).
      model_axis: devices along each region's model axis (tensor parallelism).
      expert_axis: devices along each region's expert axis, which share the batch, and
        the experts of a mixture; tokens go to their experts' devices. A divisor of
        num_experts.
      sequence_axis: devices along each region's sequence axis, which share the
        positions of every sequence; attention gathers all keys and values. A divisor of
        sequence_length.
      optimizer_memory: host keeps the inner optimizer's moments in the memory of the
        accelerators' hosts, 8 bytes per parameter less on an accelerator; each step
        loads them and stores them back. device keeps them on the accelerators.
      accumulate_steps: number of parts that each device cuts its share of a batch into;
        their gradients are averaged. Only one part's activations exist at a time.
      exchange: program averages messages in a program of the inner mesh; outer on the
        outer mesh, concurrently with the inner steps; auto is outer with several
        processes; elastic makes every region a run of its own, which may die and come
        back.
      overlap: yes compiles a fragment's start, the inner steps after it and its
        merge as one program, so that its message overlaps with computation if regions
        share a fabric; the outer state is then kept in the memory of the accelerators'
        hosts. no runs them one after another; auto is yes if regions are on several
        accelerators and messages cross in the program.
      all_reduce: how messages cross between processes: direct, every region with every
        other at once, or ring, the backend's own.
      outer_channels: number of outer meshes, so that as many fragments can be in flight
        at once, each on its own connections; at most num_fragments.
      stages: devices along each region's stage axis (pipeline stages).
      microbatches: number of parts that a pipeline cuts each region's batch into.
      random_routing: whether a pipeline passes activations to the next stage of a
        random region (NoLoCo).
      stage_subspace: k, dimensions that the residual stream is confined to, so that
        stages send k numbers per position instead of the width (Protocol Models); 0 is
        off.
      stage_compress: compressor of what stages send, both ways, such as threshold:0.1
        (DCT) or int8, in the short forms of compress; empty does not compress.
      step_seconds: minimum seconds of an inner step; above 0 the CPU simulates an
        accelerator of that speed, with the host's cores free meanwhile.
      log_every: steps that one training record averages over.
      eval_every: steps between evaluations; 0 is at the end only.
      eval_batches: validation batches in one evaluation, a multiple of `regions`.
      checkpoint_every: steps between checkpoints; 0 is at the end only.
      keep_checkpoints: number of the newest checkpoints to keep.
      change_schedule: whether a run that has begun may be resumed with another number
        of steps although its learning rate depends on it: from then on the learning
        rate is that of a run of the new length.
      adopt_from: WORKDIR or WORKDIR@STEP of a run of the same model. A new run starts
        from its newest checkpoint or that of STEP, with other regions, devices, method
        or optimizer; state that does not fit is named. Empty starts at step 0.
      spike_zscore: robust z-score of a region's loss, against its last 64, above which
        three steps of five are recorded as a spike; 0 looks for none.
      max_rollbacks: how often a process goes back to its last checkpoint instead of
        saving after a spike, and continues with the next data, skipping those since;
        after that, spikes are only recorded.
    """

    steps: int = of_kind(Kind.LENGTH, 480)
    seed: int = 0
    init_from: str = of_kind(Kind.BEGINNING, "", is_path=True)
    regions: int = 4
    step_times: str = ""
    batch_sizes: str = ""
    devices: int = free(0)
    local_regions: str = one_of(HOW_MAPPED, "auto", Kind.FREE)
    data_axis: int = free(1)
    model_axis: int = free(1)
    expert_axis: int = free(1)
    sequence_axis: int = free(1)
    optimizer_memory: str = one_of(MEMORIES, "device", Kind.FREE)
    accumulate_steps: int = free(1)
    exchange: str = one_of(EXCHANGES, "auto", Kind.FREE)
    overlap: str = one_of(OVERLAPS, "auto", Kind.FREE)
    all_reduce: str = one_of(ALL_REDUCES, "direct", Kind.FREE)
    outer_channels: int = free(1)
    stages: int = 1
    microbatches: int = 1
    random_routing: bool = False
    stage_subspace: int = of_kind(Kind.MODEL, 0)
    stage_compress: str = ""
    step_seconds: float = free(0.0)
    log_every: int = free(10)
    eval_every: int = free(0)
    eval_batches: int = free(32)
    checkpoint_every: int = free(0)
    keep_checkpoints: int = free(2)
    change_schedule: bool = free(False)
    adopt_from: str = of_kind(Kind.BEGINNING, "", is_path=True)
    spike_zscore: float = 0.0
    max_rollbacks: int = 0

    def __post_init__(self):
        check_least(
            self,
            1,
            "steps",
            "regions",
            "data_axis",
            "model_axis",
            "expert_axis",
            "sequence_axis",
            "accumulate_steps",
            "outer_channels",
            "stages",
            "microbatches",
            "eval_batches",
            "keep_checkpoints",
        )
        check_least(self, 0, "devices", "seed", "stage_subspace", "max_rollbacks")
        check_choices(self)
        if self.regions * self.devices_per_region > MAX_DEVICES:
            raise ValueError(
                f"regions={self.regions} of stages={self.stages} * data_axis="
                f"{self.data_axis} * expert_axis={self.expert_axis} * sequence_axis="
                f"{self.sequence_axis} * model_axis={self.model_axis} devices each are "
                f"more than {MAX_DEVICES} devices; lower one of them"
            )

        self.spikes(self.max_rollbacks)
        if self.max_rollbacks and self.exchange == "elastic":
            raise ValueError(
                f"max_rollbacks={self.max_rollbacks} has no meaning for exchange="
                "'elastic', where one region cannot go back alone; use 0"
            )

        if self.eval_batches % self.regions:
            raise ValueError(
                f"eval_batches={self.eval_batches} must be a multiple of regions="
                f"{self.regions}, which share them out"
            )
        if self.init_from and self.stage_subspace:
            raise ValueError(
                f"init_from={self.init_from!r} is no model whose residual stream is "
                f"confined to stage_subspace={self.stage_subspace} dimensions; leave "
                "one of them out"
            )

        if self.accumulate_steps > 1 and self.is_pipelined:
            raise ValueError(
                f"accumulate_steps={self.accumulate_steps} is not for pipelines, which "
                f"cut a batch into microbatches={self.microbatches}; use more of these"
            )
        for name in ("expert_axis", "sequence_axis"):
            if self.is_pipelined and (size := getattr(self, name)) > 1:
                raise ValueError(f"{name}={size} is not for pipelines; leave it out")
        self._check_pace()
        if self.stage_compress and self.stages == 1:
            raise ValueError(
                f"stage_compress={self.stage_compress!r} compresses messages between "
                "stages, and stages=1; use more of them, or leave it out"
            )

        self.stage_codec  # noqa: B018
        self.cadence  # noqa: B018  (its own checks)
        self.transport  # noqa: B018
        self.unequal(1)

    def _check_pace(self) -> None:
        if not 0 <= self.step_seconds < math.inf:
            raise ValueError(
                f"step_seconds={self.step_seconds} must be at least 0; 0 is as fast as "
                "it goes"
            )
        if self.step_seconds and self.devices_per_region > 1:
            raise ValueError(
                f"step_seconds={self.step_seconds} needs one device per region; "
                "leave out stages, data_axis, expert_axis, sequence_axis and model_axis"
            )
        if self.step_seconds and self.local_regions == "batched":
            raise ValueError(
                f"step_seconds={self.step_seconds} has regions sleep one after "
                "another, and local_regions='batched'; leave one of them out"
            )

    def unequal(self, batch_per_region: int) -> Regions:
        """Return the regions, by default with so many sequences a step."""
        times = _numbers("step_times", self.step_times, self.regions, float)
        sizes = _numbers("batch_sizes", self.batch_sizes, self.regions, int)
        return Regions(
            times or (1.0,) * self.regions,
            sizes or (batch_per_region,) * self.regions,
        )

    @property
    def how_mapped(self) -> str:
        """How a device computes several regions; in turn if step time is simulated."""
        return "in_turn" if self.step_seconds else self.local_regions

    @property
    def own_regions(self) -> int:
        """Regions in one JAX job: all, or one if each is a separate job."""
        return 1 if self.exchange == "elastic" else self.regions

    @property
    def devices_per_region(self) -> int:
        """Devices that share one region."""
        others = self.stages * self.sequence_axis * self.model_axis
        return self.devices_per_batch * others

    @property
    def devices_per_batch(self) -> int:
        """Devices with different sequences of one region."""
        return self.data_axis * self.expert_axis

    @property
    def transport(self) -> Transport:
        """How messages cross regions."""
        return Transport(
            self.exchange,
            self.all_reduce,
            self.outer_channels,
            overlap=self.overlap,
        )

    @property
    def is_pipelined(self) -> bool:
        """Whether a pipeline computes a region's step."""
        return self.stages > 1 or self.microbatches > 1 or self.random_routing

    @property
    def stage_codec(self) -> StageCodec | None:
        """Codec of what stages send; None is uncompressed."""
        return build_codec(self.stage_compress) if self.stage_compress else None

    def spikes(self, rollbacks_left: int) -> SpikeWatch:
        """Return whether to look for spikes, and to go back if rollbacks are left."""
        return SpikeWatch(self.spike_zscore, rollbacks_left > 0)

    @property
    def cadence(self) -> Cadence:
        """How often the loop logs, evaluates and saves."""
        return Cadence(self.log_every, self.eval_every, self.checkpoint_every)


def _numbers(name: str, text: str, count: int, kind: Callable) -> tuple:
    """Parse "1,1,2,4"; empty is ()."""
    if not text:
        return ()
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()

    if len(values) != count:
        raise ValueError(
            f"{name}={text!r} must be {count} numbers separated by commas, one for "
            "each region"
        )
    return values
