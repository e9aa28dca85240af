"""Settings that make no sense are refused by name, and suspicious ones warn."""

import warnings
from dataclasses import dataclass, replace

import pytest
from cases import (
    CONSTANT_LENGTH_ROWS,
    COV_ROWS,
    GSPO_LIKE,
    HARD_CLIP_ROWS,
    OWN_SAMPLER_ROWS,
    ROWS,
    SEQUENCE_ROWS,
    TOKEN_CLIP_ROWS,
    bare,
    evaluate,
    kl_in_loss,
    random_case,
)

import gspo
from gspo.errors import ConfigError
from gspo.objectives.objective import change
from gspo.objectives.trust_region import Clip

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("row", GSPO_LIKE)
@pytest.mark.parametrize("kw", [{"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.01}, {"clip_high": 0.01}], ids=str)
def test_warns_of_a_token_clip_range_on_a_sequence_ratio(row, kw):
    with pytest.warns(UserWarning, match="clip"):
        gspo.objective(row, **kw)


@pytest.mark.parametrize("row", [*TOKEN_CLIP_ROWS, "clip_cov", "minirl"])
def test_warns_of_a_sequence_clip_range_on_a_token_ratio(row):
    with pytest.warns(UserWarning, match="clip"):
        gspo.objective(row, clip_low=3e-4, clip_high=4e-4)


@pytest.mark.parametrize("row", ROWS)
def test_defaults_do_not_warn(row):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gspo.objective(row)


@pytest.mark.parametrize("row", GSPO_LIKE)
def test_warns_when_the_denominator_is_the_inference_engine(row):
    case = random_case(0, scale=1e-3)
    same = case.replace(logp_sampler=case.logp_old.clone())
    with pytest.warns(UserWarning, match=r"sampler|mismatch"):
        evaluate(row, same, sampler=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(row, case, sampler=True)
        evaluate(row, case)
        evaluate(gspo.objective(row, mismatch="token_tis"), same, row=row, sampler=True)
        evaluate("dapo", same, sampler=True)


def test_warns_when_grpo_has_no_reference_for_its_default_kl():
    case = random_case(0)
    with pytest.warns(UserWarning, match="ref"):
        evaluate("grpo", case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate("grpo", case, ref=True)
        evaluate(gspo.objective("grpo", kl=0.0), case, row="grpo")


@pytest.mark.parametrize("row", ROWS)
def test_refuses_an_explicit_kl_without_a_reference(row):
    objective = kl_in_loss(row, kl=0.1)
    with pytest.raises(ValueError, match="logp_ref"):
        evaluate(objective, random_case(0), row=row)


def test_refuses_an_unknown_row_and_lists_the_rows():
    with pytest.raises(ValueError, match="gspo_token") as caught:
        gspo.objective("gspoo")
    assert all(row in str(caught.value) for row in ROWS)
    case = random_case(0)
    with pytest.raises(ValueError, match="gspo_token"):
        gspo.policy_loss("gspoo", case.logp, case.logp_old, case.advantage, case.mask)
    with pytest.raises(ValueError, match="gspo_token"):
        gspo.group_advantage("gspoo", [1.0], [0])


@pytest.mark.parametrize("row", ROWS)
def test_refuses_an_unknown_setting_and_names_the_valid_ones(row):
    with pytest.raises(ValueError, match="clip_lo_") as caught:
        gspo.objective(row, clip_lo_=0.1)
    assert "kl_estimator" in str(caught.value)
    for name in {"gspo": ["clip_low", "clip_high"], "sapo": ["tau_pos", "tau_neg"], "cispo": ["weight_cap"]}.get(
        row, []
    ):
        assert name in str(caught.value)


OWN_SETTINGS = {
    "clip_low": (*HARD_CLIP_ROWS, "minirl", "gmpo", "fspo"),
    "clip_high": (*HARD_CLIP_ROWS, "minirl", "gmpo", "fspo"),
    "dual_clip": HARD_CLIP_ROWS,
    "weight_cap": ("cispo", "minirl", "minpro"),
    "delta_low": ("dppo_tv", "dppo_kl"),
    "max_divergence": ("trm",),
    "length_norm": ("gspo", "gspo_token", "luspo", "fspo", "vespo"),
    "denominator": ("vespo",),
    "advantage_scale": tuple(set(ROWS) - {"reinforce_pp", "maxrl", "ppo_clip", "gpg", "rloo"}),
    "tau_pos": ("sapo", "sspo"),
    "tau_neg": ("sapo", "sspo"),
    "k_pos": ("vespo",),
    "lambda_neg": ("vespo",),
    "max_length": CONSTANT_LENGTH_ROWS,
    "sigma_base": ("maspo",),
    "mass_power": ("maspo",),
    "select_fraction": COV_ROWS,
    "cov_low": ("clip_cov",),
    "cov_high": ("clip_cov",),
    "cov_kl": ("kl_cov",),
}


VALUE = {
    "length_norm": "sqrt",
    "denominator": "sampler",
    "advantage_scale": "std",
    "dual_clip": 3.0,
    "weight_cap": 4.0,
    "max_length": 100,
    "select_fraction": 0.1,
    "cov_high": 6.0,
}


@pytest.mark.parametrize("setting", OWN_SETTINGS)
@pytest.mark.parametrize("row", ROWS)
def test_a_setting_is_taken_by_its_rows_and_refused_by_name_elsewhere(row, setting):
    value = VALUE.get(setting, 0.5)
    if row in OWN_SETTINGS[setting]:
        gspo.objective(row, **{setting: value})
    else:
        with pytest.raises(ValueError, match=setting):
            gspo.objective(row, **{setting: value})


@pytest.mark.parametrize(
    ("setting", "value", "valid"),
    [
        ("kl_estimator", "k4", "k3_ratio"),
        ("kl_in", "advantage", "reward"),
        ("mismatch", "tis", "token_tis"),
        ("keep", "some", "mixed"),
        ("shape", "hard", "soft_overlong"),
    ],
)
def test_refuses_an_unknown_choice_and_names_the_valid_ones(setting, value, valid):
    extra = {"kl": 0.1} if setting.startswith("kl") else {}
    with pytest.raises(ValueError, match=setting) as caught:
        gspo.objective("dapo", **extra, **{setting: value})
    assert valid in str(caught.value)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_may_have_its_kl_in_the_loss(row):
    gspo.objective(row, kl=0.1, kl_in="loss")


def test_rewards_that_are_not_seen_cannot_carry_the_kl():
    with pytest.raises(ValueError, match="kl_in"):
        gspo.objective("ppo_clip", kl=0.1, kl_in="reward")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mismatch", ["token_tis", "icepop", "sequence_mask", "sequence_tis"])
def test_mismatch_needs_the_sampler_or_is_refused(row, mismatch):
    if row in OWN_SAMPLER_ROWS:
        with pytest.raises(ValueError, match="mismatch"):
            gspo.objective(row, mismatch=mismatch)
        return
    objective = bare(row, mismatch=mismatch)
    with pytest.raises(ValueError, match="logp_sampler"):
        evaluate(objective, random_case(0), row=row)


@pytest.mark.parametrize("row", ROWS)
def test_an_entropy_bonus_needs_the_entropy(row):
    objective = bare(row, entropy=0.01)
    with pytest.raises(ValueError, match="entropy"):
        evaluate(objective, random_case(0), row=row)


@pytest.mark.parametrize("row", SEQUENCE_ROWS)
def test_a_sequence_row_refuses_an_advantage_per_token(row):
    with pytest.raises(ValueError, match="gspo_token"):
        evaluate(row, random_case(0, per_token=True))


@pytest.mark.parametrize("bad", [0.0, 0.5, 1.0, -3.0])
def test_dual_clip_must_exceed_one(bad):
    with pytest.raises(ValueError, match="dual_clip"):
        gspo.objective("grpo", dual_clip=bad)


@pytest.mark.parametrize(
    ("row", "kw", "named"),
    [
        ("gspo", {"mismatch_high": 3.0}, "mismatch_high"),
        ("gspo", {"mismatch_low": 0.3}, "mismatch_low"),
        ("gspo", {"mismatch": "token_tis", "mismatch_low": 0.3}, "mismatch_low"),
        ("gspo", {"mismatch": "sequence_tis", "mismatch_low": 0.3}, "mismatch_low"),
        ("gspo", {"kl_estimator": "k2"}, "kl_estimator"),
        ("vespo", {"sampler_cap": 3.0}, "sampler_cap"),
        ("vespo", {"sampler_cap": 3.0, "denominator": "old"}, "sampler_cap"),
    ],
)
def test_refuses_a_setting_without_effect(row, kw, named):
    """An option that is set but has no effect is an error that says so."""
    with pytest.raises(ValueError, match=named):
        gspo.objective(row, **kw)


@pytest.mark.parametrize(
    ("row", "kw", "named"),
    [
        ("gspo", {"mismatch": "token_tis", "mismatch_high": 0.5}, "mismatch_high must be at least 1"),
        ("grpo", {"mismatch": "icepop", "mismatch_low": 1.5}, "mismatch_low must be at most 1"),
        ("gspo", {"mismatch": "sequence_mask", "mismatch_low": 1.0005}, "mismatch_low must be at most 1"),
        ("grpo", {"mismatch": "icepop", "mismatch_high": 0.9}, "mismatch_high must be at least 1"),
        ("vespo", {"denominator": "sampler", "sampler_cap": 0.5}, "sampler_cap: must be a finite number of at least 1"),
    ],
)
def test_refuses_a_correction_that_changes_tokens_on_which_engine_and_learner_agree(row, kw, named):
    with pytest.raises(ConfigError, match=named):
        gspo.objective(row, **kw)


@dataclass(frozen=True)
class _RegionWithText(Clip):
    side: str = "both"
    limit: float | None = 1.0


def test_the_annotation_of_a_field_decides_which_values_a_setting_takes() -> None:
    row = replace(gspo.objective("grpo"), trust_region=_RegionWithText())
    region = change(row, {"side": "low", "limit": None}).trust_region
    assert region == _RegionWithText(side="low", limit=None)
    with pytest.raises(ConfigError, match="side must be text"):
        change(row, {"side": 1})
    with pytest.raises(ConfigError, match="limit must be a number"):
        change(row, {"limit": "1"})
    with pytest.raises(ConfigError, match="clip_low must be a number, not None"):
        change(row, {"clip_low": None})


def test_a_setting_of_a_component_decides_which_options_make_sense() -> None:
    gspo.objective("vespo", mismatch="token_tis")
    with pytest.raises(ConfigError, match=r"mismatch makes no sense here.*twice"):
        gspo.objective("vespo", denominator="sampler", mismatch="token_tis")
    with pytest.raises(ConfigError, match="denominator: must be one of old, sampler"):
        gspo.objective("vespo", denominator="mu")
    with pytest.raises(ConfigError, match="logp_sampler"):
        evaluate(gspo.objective("vespo", denominator="sampler"), random_case(0), row="vespo")


def test_a_component_of_the_wrong_kind_is_refused() -> None:
    row = gspo.objective("grpo")
    for name in ("advantage", "ratio", "trust_region", "aggregate"):
        with pytest.raises(ConfigError, match=f"Objective: {name}"):
            replace(row, **{name: "token"})
