#!/bin/sh
# What batond is asked for by hand, with grpcurl, which learns the contract from the daemon (server.reflection).
#   BATOND_SERVER=127.0.0.1:7431 BATOND_TOKEN=... sh grpcurl.sh
# With TLS, leave out -plaintext and name your authority by -cacert.
set -eu
server=${BATOND_SERVER:-127.0.0.1:7431}
call() {
  grpcurl -plaintext -H "authorization: Bearer ${BATOND_TOKEN:-}" "$@"
}

# Ready for jobs? No credentials are needed for this one.
call -d '{"service": "readiness"}' "$server" grpc.health.v1.Health/Check

# What there is: services, and a message with its comments.
call "$server" list
call "$server" describe batond.v1.JobSpec

# What is served, and within which limits.
call "$server" batond.v1.AdminService/GetServerInfo

# A job in the background. The id is the caller's: the same call again attaches to the same job.
call -d '{"job_id": "tour-1", "spec": {"text": {"text": "Once upon a time"}, "sla_class": "batch", "sampling": {"max_tokens": 64}}}' \
  "$server" batond.v1.JobService/SubmitJob

# A conversation, urgent, token by token; every event is one JSON object.
call -d '{"spec": {"chat": {"messages": [{"role": "user", "content": "Hello"}]}, "sla_class": "interactive", "sampling": {"max_tokens": 8}}}' \
  "$server" batond.v1.JobService/GenerateStream

# The job in the background, from its first token to its end.
call -d '{"job_id": "tour-1", "from_token_index": 0}' "$server" batond.v1.JobService/WatchJob
call -d '{"job_id": "tour-1"}' "$server" batond.v1.JobService/GetJob
