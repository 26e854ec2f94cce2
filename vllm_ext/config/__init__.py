"""Configuration of vllm-ext: models that are checked where they are made, and the flags that their fields have."""

from vllm_ext.config import flags
from vllm_ext.config.attention import AttentionConfig
from vllm_ext.config.errors import KEY, ConfigError
from vllm_ext.config.flags import FLAGS, in_flags, merge_flags
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.config.model import Flag, flagged, made
from vllm_ext.config.options import AXES, HASH_BLOCK_TOKENS, ExtConfig, parse, to_dict
from vllm_ext.config.prediction import RETRIEVAL, PredictionConfig, PredictorConfig
from vllm_ext.config.slo import SloClass, SloConfig

__all__ = [
    "AXES",
    "FLAGS",
    "HASH_BLOCK_TOKENS",
    "KEY",
    "RETRIEVAL",
    "AttentionConfig",
    "ConfigError",
    "ExtConfig",
    "Flag",
    "KvTierConfig",
    "PredictionConfig",
    "PredictorConfig",
    "SloClass",
    "SloConfig",
    "flagged",
    "flags",
    "in_flags",
    "made",
    "merge_flags",
    "parse",
    "to_dict",
]
