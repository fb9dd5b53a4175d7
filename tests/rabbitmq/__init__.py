"""Beat, worker and Singleton on a real RabbitMQ, with classic and quorum queues, purges and alarms."""
