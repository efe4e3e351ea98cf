"""The engine: extractors' life cycle, admission, batching and the device worker. It knows nothing of HTTP."""

from service.engine.engine import Engine
from service.engine.options import FeatureOptions, FeatureResult
from service.engine.record import ExtractorRecord

__all__ = ["Engine", "ExtractorRecord", "FeatureOptions", "FeatureResult"]
