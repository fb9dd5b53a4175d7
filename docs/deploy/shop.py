"""The app of the deployment kit: its servers, ports and schedule."""

import os

from celery import Celery
from celery.schedules import crontab

from singlebeat import Singleton

app = Celery("shop", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(
    beat_schedule={"orders": {"task": "shop.import_orders", "schedule": crontab()}},
    singlebeat_metrics_host=os.environ.get("METRICS_HOST", "127.0.0.1"),
    singlebeat_metrics_port=int(os.environ.get("BEAT_METRICS_PORT", "9109")),
    singlebeat_worker_metrics_port=int(os.environ.get("WORKER_METRICS_PORT", "9110")),
)


@app.task(name="shop.import_orders", base=Singleton)
def import_orders() -> None:
    """Import the orders of the last minute."""
