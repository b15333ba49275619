"""The Celery configuration that the dispatcher (sends) and the workers (receive) share.

A message is only a wake-up: it is acknowledged early, carries no result and may be lost or come
twice. So the configuration asks the broker for no promise beyond quick delivery.
"""

from typing import Any

from celery import Celery

from service.kit.folder_transport import SCHEME, register
from service.settings import Settings

TASK_NAME = "tunegate.run_attempt"
QUEUE_NAME = "tunegate"
POLLING_SECONDS = 0.1
# Redelivery is the reaper's work. Redis must never hand a message out again by itself.
VISIBILITY_TIMEOUT_SECONDS = 7 * 86_400


def celery_configuration(settings: Settings) -> dict[str, Any]:
    """Celery's settings: the server-less transport in the data folder, or a broker by its URL."""
    return {
        "broker_url": f"{SCHEME}://localhost//" if _serverless(settings) else settings.broker,
        "broker_transport_options": _transport_options(settings),
        "broker_connection_retry_on_startup": True,
        "broker_connection_timeout": 5.0,
        "task_publish_retry": False,
        "task_default_queue": QUEUE_NAME,
        "task_acks_late": False,
        "task_ignore_result": True,
        "task_store_errors_even_if_ignored": False,
        "result_backend": None,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "worker_pool": "threads",
        "worker_concurrency": 1,
        "worker_prefetch_multiplier": 1,
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "enable_utc": True,
    }


def _serverless(settings: Settings) -> bool:
    return settings.broker.startswith("filesystem:")


def _transport_options(settings: Settings) -> dict[str, Any]:
    if _serverless(settings):
        folder = settings.broker_dir
        return {
            "data_folder_in": str(folder / "messages"),
            "data_folder_out": str(folder / "messages"),
            "processed_folder": str(folder / "processed"),
            "control_folder": str(folder / "control"),
            "store_processed": False,
            "polling_interval": POLLING_SECONDS,
        }
    if settings.broker.startswith(("redis:", "rediss:", "redis+", "sentinel:")):
        return {
            "visibility_timeout": VISIBILITY_TIMEOUT_SECONDS,
            "health_check_interval": 25,
            "socket_keepalive": True,
            "socket_connect_timeout": 5.0,
            "socket_timeout": 30.0,
        }
    return {}


def create_celery(settings: Settings, name: str = "tunegate") -> Celery:
    """A Celery application for `settings`; makes the folders of the server-less transport."""
    configuration = celery_configuration(settings)
    if _serverless(settings):
        register()
        for part in ("messages", "processed", "control"):
            (settings.broker_dir / part).mkdir(parents=True, exist_ok=True)
    # set_as_current: a second application in one process (tests, the gateway) must not take over.
    app = Celery(name, set_as_current=False)
    app.conf.update(configuration)
    return app
