"""What all bodies of the API have in common."""

from pydantic import BaseModel, ConfigDict


class RequestBody(BaseModel):
    """Strict types, documented fields."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True, protected_namespaces=())


class ResponseBody(BaseModel):
    """What the server sends."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())
