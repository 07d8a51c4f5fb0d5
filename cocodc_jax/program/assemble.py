"""Validate the arguments of a `RegionProgram`, and make its inner steps."""

import dataclasses
import functools
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from cocodc_jax.core.checks import (
    check_accumulation,
    check_arrays,
    check_inner_state,
    check_passed,
)
from cocodc_jax.engine.crossing import Trainer
from cocodc_jax.engine.frozen import Trainable, find_trained, without_masks
from cocodc_jax.engine.sync_program import Setting, make_setting
from cocodc_jax.engine.transport import Transport
from cocodc_jax.sync.accumulation import find as find_accumulation
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.inner_state import is_moved, merge_opt_state
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.model_state import AnyLossFn, ModelState
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms.numerics import check_transform

PyTree = Any


def checked(
    loss_fn: AnyLossFn,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    method: Method | str,
    params: PyTree,
    regions: int | Regions,
    mesh: Mesh | None,
    fragments: Fragments | None,
    user_inputs: UserInputs,
    transport: Transport,
    model_state: ModelState | None,
    trainable: Trainable,
) -> Setting:
    """Validate the arguments of a program, see `RegionProgram`; fill in defaults."""
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn={loss_fn!r} must be a function, (params, batch, key) -> (loss, "
            "aux)"
        )
    check_transform("optimizer", optimizer, "optax.adam(1e-3)")
    if isinstance(optimizer, optax.MultiSteps):  # Accepts `value=`.
        multi_steps: Any = optimizer
        optimizer = optax.GradientTransformationExtraArgs(
            multi_steps.init, multi_steps.update
        )

    check_arrays(params)
    whole = jax.eval_shape(lambda x: x, params)
    setting = make_setting(
        method,
        whole,
        regions,
        Trainer(
            loss_fn=loss_fn,
            user_inputs=user_inputs,
            optimizer=optimizer,
            model_state=model_state,
        ),
        transport,
        mesh=mesh,
        fragments=fragments,
        trained=find_trained(trainable, whole, optimizer),
    )
    return _with_optimizer(setting, optimizer)


def _with_optimizer(
    setting: Setting, optimizer: optax.GradientTransformation
) -> Setting:
    """Check what the inner optimizer's state holds, and how merges move it."""
    method = setting.method
    params = setting.params
    trainer = setting.trainer
    user_inputs = trainer.user_inputs

    accumulation = find_accumulation(optimizer, params)
    check_accumulation(accumulation, method, setting.regions.step_times)
    copies = check_inner_state(optimizer, method, params, user_inputs)
    check_passed(copies.state)

    if setting.trained is not None and user_inputs.second_moment is not None:
        second_moment = without_masks(user_inputs.second_moment, params)
        user_inputs = dataclasses.replace(user_inputs, second_moment=second_moment)
    on_merge = None
    if user_inputs.on_merge is not None or is_moved(copies.state):
        on_merge = functools.partial(merge_opt_state, on_merge=user_inputs.on_merge)
    return dataclasses.replace(
        setting,
        trainer=dataclasses.replace(
            trainer, user_inputs=user_inputs, on_merge=on_merge
        ),
        accumulation=accumulation,
        holds_copies=copies.some,
    )
