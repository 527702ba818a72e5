"""MS COCO: annotations, images, and what is trained on them."""

from datamodules.coco.datamodule import COCO as COCO
from datamodules.coco.tiny import COCOTiny as COCOTiny
