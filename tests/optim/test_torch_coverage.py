"""Every check that torch's ``test/test_optim.py`` makes of its optimizers: made here, elsewhere, or not, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tests.optim.database import DATABASE, TORCH_DATABASE, takes
from tests.table import LESS_THAN_SHARED, TABLE

TESTS_OF_TORCH = [
    "test_adamw_serialization",
    "test_can_load_from_to_named_state_dict",
    "test_can_load_older_state_dict",
    "test_complex",
    "test_complex_2d",
    "test_cpu_load_state_dict",
    "test_deepcopy_copies_all_public_attrs",
    "test_defaults_changed_to_foreach",
    "test_errors",
    "test_foreach_large_tensor",
    "test_foreach_matches_forloop",
    "test_forloop_goes_right_direction",
    "test_forloop_goes_right_direction_multigpu",
    "test_fused_cpu_matches_cuda",
    "test_fused_does_not_step_if_foundinf",
    "test_fused_error_on_params_on_meta",
    "test_fused_large_tensor",
    "test_fused_matches_forloop",
    "test_load_nontensor_step",
    "test_load_state_dict_post_hook",
    "test_load_state_dict_pre_hook_and_prepend",
    "test_load_state_dict_pre_post_hook",
    "test_mixed_device_dtype",
    "test_non_empty_state",
    "test_optim_infos_do_not_specify_global_cliquey_kwargs",
    "test_optimizer_can_be_printed",
    "test_param_group_with_lrscheduler_goes_right_direction",
    "test_param_groups_lr",
    "test_param_groups_weight_decay",
    "test_peak_memory_foreach",
    "test_rosenbrock_sparse",
    "test_save_load_equality_with_weights_only",
    "test_second_order_optims_return_consistent_types",
    "test_set_default_dtype_works_with_foreach",
    "test_state_dict_deterministic",
    "test_state_dict_post_hook",
    "test_state_dict_pre_hook",
    "test_state_dict_pre_post_hook",
    "test_state_dict_with_cuda_params",
    "test_step_all_hooks",
    "test_step_is_noop_for_zero_grads",
    "test_step_is_noop_when_params_have_no_grad",
    "test_step_post_hook",
    "test_step_pre_hook",
    "test_tensor_lr",
]
"""The methods of torch's ``TestOptimRenewed``."""

ELSEWHERE = {
    "test_step_pre_hook": "optim/test_torch_generic_state.py::test_step_pre_hook_and_post_hook",
    "test_step_post_hook": "optim/test_torch_generic_state.py::test_step_pre_hook_and_post_hook",
    "test_second_order_optims_return_consistent_types": "optim/test_closure_results.py::test_a_loss",
    "test_fused_does_not_step_if_foundinf": (
        "optim/test_amp.py::test_grad_scaler_skips_a_step_with_infinities_and_lowers_its_scale"
    ),
    "test_fused_cpu_matches_cuda": "test_cuda.py::test_same_run_on_both_devices",
    "test_state_dict_with_cuda_params": "test_cuda.py::test_a_checkpoint_moves_between_devices",
    "test_cpu_load_state_dict": "test_cuda.py::test_a_checkpoint_moves_between_devices",
    "test_fused_large_tensor": "test_cuda.py::test_more_elements_than_32_bits_can_count",
    "test_peak_memory_foreach": "test_cuda.py::test_no_temporary_of_the_size_of_the_parameters",
}
"""Made under another name: most of them need a GPU."""

EXCEPTIONS = {
    "test_complex": "complex parameters are refused: a posterior over them would need a covariance of the two parts",
    "test_complex_2d": "complex parameters are refused, as in test_complex",
    "test_rosenbrock_sparse": "sparse parameters and gradients are refused: the prior moves every weight in every step",
    "test_forloop_goes_right_direction_multigpu": (
        "needs two GPUs; a CPU and a GPU in one optimizer are in test_cuda.py::test_mixed_devices_in_one_optimizer"
    ),
    "test_foreach_large_tensor": "foreach is of the same calls for tensors of all sizes; kernels count for themselves",
    "test_adamw_serialization": "it is about AdamW, which loads what Adam has saved; methods here refuse each other's",
}
"""Not made, and why."""


HERE = [f"optim/test_torch_generic{part}.py" for part in ("", "_implementations", "_state")]


def is_in(file, name):
    return f"def {name}(" in (Path(__file__).parents[1] / file).read_text()


@pytest.mark.parametrize("name", TESTS_OF_TORCH)
def test_every_check_of_torch_is_made_or_excepted(name):
    here = any(is_in(file, name) for file in HERE)
    assert [here, name in ELSEWHERE, name in EXCEPTIONS].count(True) == 1


def test_nothing_else_is_excepted():
    assert ELSEWHERE.keys() | EXCEPTIONS.keys() <= set(TESTS_OF_TORCH)


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_what_is_said_to_be_elsewhere_is_there(place):
    assert is_in(*place.split("::"))


def test_the_names_that_this_torch_has_in_its_database_are_known():
    """The skips of torch's rows name tests: a new one is a check that torch has and this list has not."""
    named = {
        getattr(decorator, "test_name", None)
        for info in TORCH_DATABASE
        for decorator in info.decorators
        if getattr(decorator, "cls_name", None) == "TestOptimRenewed"
    }
    assert named - {None} <= set(TESTS_OF_TORCH)


@pytest.mark.parametrize(
    ("info", "row"), list(zip(DATABASE, [*TABLE, *LESS_THAN_SHARED], strict=True)), ids=lambda value: value.name
)
def test_a_row_says_what_its_optimizer_can_do(info, row):
    """What the database claims, found out by building one."""
    weights = [nn.Parameter(nn.init.ones_(nn.Linear(2, 1).weight))]
    assert info.has_capturable_arg == takes(row, "capturable")
    for flag in ("foreach", "fused"):
        if flag in info.supported_impls and (flag != "fused" or "cpu" in info.supports_fused_on):
            assert info.optim_cls(weights, **{flag: True}).param_groups[0][flag]
        else:
            with pytest.raises((TypeError, ValueError), match=flag):
                info.optim_cls(weights, **{flag: True})
    optimizer = info.optim_cls(weights)
    if info.step_requires_closure:
        with pytest.raises(RuntimeError, match="must be given an objective"):
            optimizer.step()
    else:
        with optimizer.sampled_params():
            weights[0].sum().backward()
        optimizer.step()
    assert not info.supports_complex  # and so refused, in test_errors
