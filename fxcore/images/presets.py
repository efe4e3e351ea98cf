"""The classes of torchvision's own preprocessing, as its published weights name them.

No public module has them: ``torchvision.transforms._presets``, where they are defined, is private.
"""

from __future__ import annotations

from typing import Any

from torchvision.models import ResNet18_Weights
from torchvision.models.segmentation import FCN_ResNet50_Weights
from torchvision.models.video import R3D_18_Weights

ImageClassification: Any = type(ResNet18_Weights.IMAGENET1K_V1.transforms())
SemanticSegmentation: Any = type(FCN_ResNet50_Weights.COCO_WITH_VOC_LABELS_V1.transforms())
VideoClassification: Any = type(R3D_18_Weights.KINETICS400_V1.transforms())
