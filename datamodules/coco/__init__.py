"""Data in the format of MS COCO, for segmentation, detection and captions."""

from datamodules.coco.datamodule import COCO as COCO
from datamodules.coco.tiny import COCOTiny as COCOTiny
