"""The engine: extractor life cycle, admission, batching and the device worker. It does not depend on HTTP."""

from service.engine.engine import Engine
from service.engine.options import FeatureOptions, FeatureResult
from service.engine.record import ExtractorRecord

__all__ = ["Engine", "ExtractorRecord", "FeatureOptions", "FeatureResult"]
