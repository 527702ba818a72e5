"""MS COCO: its annotations and images, as data for segmentation and for captions."""

from datamodules.coco.datamodule import COCO as COCO
from datamodules.coco.tiny import COCOTiny as COCOTiny
