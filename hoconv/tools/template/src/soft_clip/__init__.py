from soft_clip.layer import SoftClip
from soft_clip.operator import soft_clip

__all__ = ["SoftClip", "soft_clip"]
