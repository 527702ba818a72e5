"""MS COCO: annotations, images, and what is trained on them."""

from datamodules.coco.datamodule import COCO as COCO
