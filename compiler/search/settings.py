"""Declares the settings of `allocate`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from coldpress.compiler.candidates import AUTO, DEFAULT_FORMAT
from coldpress.compiler.cost_model import DramBudget
from coldpress.compiler.quality.passes import PassesConfig
from coldpress.compiler.search.density import AllocationConfig
from coldpress.compiler.shared_settings import (
    CacheSetting,
    DraftSetting,
    MethodSetting,
    QualitySetting,
    RoutingLimitSetting,
)
from coldpress.runtime import plugins
from coldpress.runtime.dram.kv_cache import DEFAULT_KV_CACHE
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.base import PositiveCount
from coldpress.schemas.config import Key
from coldpress.schemas.families import FormatName, UnitFormat
from coldpress.schemas.layout import KvCacheFormat


class AllocateConfig(
    AllocationConfig, PassesConfig, MethodSetting, CacheSetting, DraftSetting, RoutingLimitSetting, QualitySetting
):
    ONLY_FOR_AUTO: ClassVar = (
        "explore",
        "explore_tokens",
        "algorithm",
        "max_ppl_ratio",
        "min_tokens_per_s",
        "routing",
        "routing_kl",
    )
    """Settings that matter only with method=auto."""

    format: Annotated[
        UnitFormat,
        Key(
            plugins="coldpress.runtime.quantization",
            joint=True,
            auto=True,
            default=f"`auto` with method=auto and for dense runs of GGUF files, else {DEFAULT_FORMAT}",
        ),
    ] = Field(
        default=DEFAULT_FORMAT,
        description="how weights are stored; named to fix bytes and quality; several with + between are those of gate, "
        "up and down, or of up and down, and all else has the one with the fewest bits; auto: chosen by measured "
        "losses, or with method=dense a quantized GGUF file's own",
    )
    dram_budget: Annotated[DramBudget, Key(default="the device's")] = Field(
        description="bytes, 3GB, 1.5GiB, or a share such as 50% of what weights and KV cache take in the build's "
        "formats, plus fixed bookkeeping; several as 1GB,2GB,4GB give one artifact with a plan for each; the largest "
        "runs by default"
    )
    min_tokens_per_s: Annotated[
        Annotated[float, Field(gt=0)] | None, Key(default="none: the fastest that keeps max_ppl_ratio")
    ] = Field(
        default=None,
        description="modelled tokens a second on the device that are enough: method=auto then takes the best quality "
        "that reaches them",
    )
    context_length: Annotated[PositiveCount, Key(default="the model's, at most 1024")] = Field(
        description="tokens that the KV cache holds; it is part of the budget; longer for long chats and documents"
    )
    kv_cache: Annotated[
        Literal["auto", KvCacheFormat], Key(auto=True, default=f"`auto` with method=auto, else {DEFAULT_KV_CACHE}")
    ] = Field(
        default=DEFAULT_KV_CACHE,
        description="format of keys and values; int8 takes 17/32 of the bytes of fp16, for a little quality; auto: "
        "fp16, unless int8 keeps max_ppl_ratio and makes a token clearly faster, or nothing fits in fp16",
    )
    density: Annotated[float | None, Key(default="derived from the budget; measured where zeros are exact")] = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the MLP's weights that a token uses; in a mixture, of the routed experts' weights; with "
        "attention=true, of attention's, too; given to fix the trade of quality for speed",
    )
    predictor_format: Annotated[FormatName, Key(plugins="coldpress.runtime.quantization")] = Field(
        default="int8_group32", description="how predictors are stored; fp16 where their rounding shows"
    )
    head_as_layers: bool = Field(
        default=False,
        description="whether the head has the format of the layers, too: of a draft model, which is checked",
    )
    layers_per_group: Annotated[PositiveCount, Key()] = Field(
        default=1,
        description="consecutive layers whose units lie together on flash; several to read across layers, as "
        "ActiveFlow does",
    )

    @field_validator("predictor_format")
    @classmethod
    def _final(cls, value: FormatName) -> FormatName:
        package = "coldpress.runtime.quantization"
        if not load(package, Format, value).IS_FINAL:
            known = [name for name in plugins.names(package) if load(package, Format, name).IS_FINAL]
            raise ValueError(
                f"predictor_format={value} is searched anew each time weights are stored, so that a trained predictor "
                f"would change; use {' or '.join(known)}"
            )
        return value

    @property
    def kv_cache_format(self) -> KvCacheFormat:
        """The KV-cache format; while it is open, the default, by which a budget in percent is counted."""
        return DEFAULT_KV_CACHE if self.kv_cache == AUTO else self.kv_cache
