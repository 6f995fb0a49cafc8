"""Keys and values of attention, cached in buckets of one bit width each, and attention over them."""

from .attention import attention
from .cache import KVCache
from .tiers import Bucket, Tier

__all__ = ["Bucket", "KVCache", "Tier", "attention"]
