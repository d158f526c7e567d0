"""Families of models for tasks other than text generation, each with what it is for, in the words of a refusal.

Well-known families are listed here; every other one is looked up in the tables of the installed transformers.
"""

from __future__ import annotations

from types import MappingProxyType

from fingerprint.config_json import show
from fingerprint.errors import UnsupportedModelError

__all__ = ["ask_for_text", "generates_no_text", "known_task", "task_by_transformers"]

_TEXT_ENCODING = "encodes text"
_MATCHING = "matches images with text"
_VISION = "encodes or classifies images"
_DETECTION = "detects objects in images"
_SEGMENTATION = "segments images"
_SOUND = "encodes or classifies sound"
_RECOGNITION = "recognises speech"
_SYNTHESIS = "makes speech or other sound"
_TIME_SERIES = "analyses time series"

_FAMILIES = {
    _TEXT_ENCODING: "bert roberta camembert xlm-roberta distilbert electra deberta deberta-v2 modernbert albert"
    " mpnet longformer mobilebert nomic_bert eurobert convbert fnet gte jina_embeddings_v3 modernvbert"
    " clip_text_model esm esmc",
    _MATCHING: "clip siglip siglip2 metaclip_2 align altclip chinese_clip clipseg xclip groupvit aimv2",
    _VISION: "vit deit beit swin swinv2 dinov2 dinov2_with_registers dinov3_vit convnext convnextv2 resnet"
    " clip_vision_model siglip_vision_model siglip2_vision_model radio vivit videomae videoprism vit_mae",
    _DETECTION: "detr conditional_detr deformable_detr rt_detr rt_detr_v2 yolos owlvit owlv2 grounding-dino",
    _SEGMENTATION: "sam sam2 segformer mask2former oneformer",
    _SOUND: "audio-spectrogram-transformer clap",
    _RECOGNITION: "wav2vec2 wav2vec2-bert wav2vec2-conformer hubert wavlm sew parakeet_ctc",
    _SYNTHESIS: "vits bark csm speecht5 fastspeech2_conformer",
    "makes images": "imagegpt",
    "predicts actions": "decision_transformer",
    _TIME_SERIES: "patchtst patchtsmixer timesfm timesfm2_5 autoformer informer time_series_transformer",
}
_TASKS = MappingProxyType({name: task for task, names in _FAMILIES.items() for name in names.split()})

# Tables of transformers' ``modeling_auto``, the most telling one first: a family is often in several.
_TABLES = (
    ("ZERO_SHOT_IMAGE_CLASSIFICATION", _MATCHING),
    ("RETRIEVAL", _MATCHING),
    ("ZERO_SHOT_OBJECT_DETECTION", _DETECTION),
    ("OBJECT_DETECTION", _DETECTION),
    ("MASK_GENERATION", _SEGMENTATION),
    ("UNIVERSAL_SEGMENTATION", _SEGMENTATION),
    ("SEMANTIC_SEGMENTATION", _SEGMENTATION),
    ("IMAGE_MATTING", _SEGMENTATION),
    ("DEPTH_ESTIMATION", "estimates depth in images"),
    ("POSE_ESTIMATION", "estimates poses in images"),
    ("KEYPOINT_DETECTION", "finds keypoints in images"),
    ("KEYPOINT_MATCHING", "matches keypoints of images"),
    ("TABLE_RECOGNITION", "recognises tables in images"),
    ("TEXT_RECOGNITION", "recognises characters in images"),
    ("VIDEO_CLASSIFICATION", "classifies videos"),
    ("TEXT_TO_WAVEFORM", _SYNTHESIS),
    ("TEXT_TO_SPECTROGRAM", _SYNTHESIS),
    ("CTC", _RECOGNITION),
    ("RNNT", _RECOGNITION),
    ("TDT", _RECOGNITION),
    ("SPEECH_SEQ_2_SEQ", "is an encoder-decoder model of speech"),
    ("AUDIO_CLASSIFICATION", _SOUND),
    ("AUDIO_FRAME_CLASSIFICATION", _SOUND),
    ("TIME_SERIES_PREDICTION", _TIME_SERIES),
    ("TIME_SERIES_CLASSIFICATION", _TIME_SERIES),
    ("VISUAL_QUESTION_ANSWERING", "answers questions on images with a label"),
    ("MASKED_LM", _TEXT_ENCODING),
    ("TEXT_ENCODING", _TEXT_ENCODING),
    ("SEQUENCE_CLASSIFICATION", _TEXT_ENCODING),
    ("TOKEN_CLASSIFICATION", _TEXT_ENCODING),
    ("QUESTION_ANSWERING", _TEXT_ENCODING),
    ("IMAGE_CLASSIFICATION", _VISION),
    ("IMAGE_TO_IMAGE", "restores images"),
    ("IMAGE", _VISION),
    ("BACKBONE", _VISION),
)


def known_task(model_type: str) -> str | None:
    """Return what a well-known family is for, as a verb with its object; None: not listed."""
    return _TASKS.get(model_type)


def task_by_transformers(model_type: str) -> str | None:
    """Return what a family of transformers is for, if its tables of classes say so."""
    from transformers.models.auto import modeling_auto

    tables = ((getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}), task) for table, task in _TABLES)
    return next((task for families, task in tables if model_type in families), None)


def generates_no_text(model_type: str, task: str) -> UnsupportedModelError:
    """Return the refusal of a family that is for ``task``."""
    return UnsupportedModelError(
        f"model_type {show(model_type)} {task} and generates no text from a prompt; {ask_for_text()}"
    )


def ask_for_text() -> str:
    """Return the advice that ends the refusal of a model for another task."""
    return "give a model that generates text, whose class ends in ForCausalLM or ForConditionalGeneration"
