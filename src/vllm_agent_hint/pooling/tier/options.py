"""What an operator may say of the tier in ``kv_connector_extra_config``."""

from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_PREFIX: Final = "kv_connector_extra_config"


class TierOptions(BaseModel):
    """The tier's own options; those of vLLM's connector stand beside them and are left alone.

    Args:
        cpu_bytes_to_use: Host memory for KV blocks, of all workers together.
        directory: Where blocks are kept beyond host memory, beyond this server's life, and for
            other servers. None: host memory only.
        directory_bytes: Bound on the files there; above it the least recently used go.
        load_bytes_per_second: Throttle on loading, for tests and benchmarks. None: none.
        save_bytes_per_second: The same on saving.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    cpu_bytes_to_use: Annotated[int, Field(ge=1)]
    directory: str | None = None
    directory_bytes: Annotated[int, Field(ge=1)] = 1 << 40
    load_bytes_per_second: Annotated[float, Field(gt=0)] | None = None
    save_bytes_per_second: Annotated[float, Field(gt=0)] | None = None

    @classmethod
    def read(cls, extra_config: Any) -> Self:
        """
        Raises:
            ValueError: Naming the option and the cure; vLLM then does not start.
        """
        try:
            return cls.model_validate(dict(extra_config))
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            field = ".".join(map(str, (_PREFIX, *first["loc"])))
            raise ValueError(f"{field}: {first['msg']}") from None
