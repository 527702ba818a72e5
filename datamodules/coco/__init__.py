"""Data in the format of MS COCO, for segmentation, detection, captions and denoising."""

from datamodules.coco.datamodule import COCO as COCO
from datamodules.coco.tiny import COCOTiny as COCOTiny
