"""The settings of one engine, and its budgets. Those of the server have the same meaning, and partly other defaults."""

from dataclasses import dataclass

from attention_service.models.server.model_environment import NO_PREFIXES, KeptPrefixes
from attention_service.runtime.device.torch_device import BUDGET_SHARE, Device, free_host_bytes
from attention_service.runtime.scheduling.watchdog import PATIENCE_S


@dataclass(frozen=True)
class EngineSettings:
    """Limits, shares and habits of one engine."""

    memory_budget: int | None = None
    """Bytes of the device for modules, sessions and requests; None for a share of the free ones."""
    host_memory_budget: int | None = None
    """Bytes of the host beside a GPU; None for a share of the free ones."""
    replicas: int = 1
    """Processes that serve together from one folder, and share the budgets of a host."""
    max_queue: int = 256
    """Requests that wait for memory."""
    max_predicted_s: float | None = None
    """The longest predicted time of a request; None for any."""
    stuck_s: float = PATIENCE_S
    """Seconds without progress after which a lane or a model's process counts as stuck."""
    learns_times: bool = True
    """True to correct predicted times by measured ones, and to store the factors."""
    max_modules: int = 1024
    hub_limit: int = 2**36
    """The most bytes of one checkpoint that is fetched."""
    recordings_limit: int = 2**33
    """Bytes of all recordings, of all lenses, of all probes, and of all vectors."""
    max_sessions: int = 4096
    session_ttl_s: float = 600.0
    """Seconds without a request after which a session ends."""
    session_share: float = 0.5
    """The share of the memory budget that sessions may take."""
    session_pinned_share: float = 0.5
    """The share of that which sessions may hold that are never evicted."""
    model_idle_s: float = 600.0
    """Seconds without a request after which a whole model ends."""
    model_devices: int = 1
    """The devices that each whole model is spread over, of those that can be."""
    spare_model_process: bool = False
    """True to keep a process ready for the next whole model."""
    prefixes: KeptPrefixes = NO_PREFIXES
    """The part of texts that have ended that each whole model keeps."""

    def budget_on(self, device: Device) -> int:
        """Bytes of the device for one process. Processes share the host, and a GPU has one."""
        whole = int(BUDGET_SHARE * device.free_bytes()) if self.memory_budget is None else self.memory_budget
        return whole if device.is_cuda else whole // self.replicas

    def budget_of_host(self) -> int:
        """Bytes of the host for one process beside a GPU."""
        return (self.host_memory_budget or int(BUDGET_SHARE * free_host_bytes())) // self.replicas
