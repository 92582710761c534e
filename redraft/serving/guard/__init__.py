"""The guard: a process in front of Triton's HTTP and gRPC ports that passes on only what Triton can bear.

| check | where | needed by which Triton |
|---|---|---|
| chunks of a body: `MAX_CHUNKS` | `over_http._read` | before 25.07 (CVE-2025-23310): each chunk lies on its stack |
| `classification` of an output | `checks._check_parameters` | without server#8267 (June 2025): it ends the server |
| depth of JSON: 200 levels | `checks.checked_json` | without common#156 (April 2026): its reader recurses |
| a body's content type: `application/json` | `over_http._run` | all (server#5840, open): a large form ends it |
| numbers of fields, texts, tensors | `checks._check_fields` and its kin | all that were tried: takes square time |
| integers of 32 bits | `checks._check_items` | all that were tried: HTTP cuts them to another number |
| NUL characters, negative and huge shapes | `checks._check_name`, `checks._check_shape` | all that were tried |
| memory of bodies, calls and streams | `limits`, `over_http`, `over_grpc` | all: Triton has no limits of its own |
| `Origin` of web pages | `over_http._check_origin` | all: Triton answers whatever site asks |
| repository, shared memory, trace, logging | both protocols' routes | all: they are open to whoever reaches the port |
| statuses by code | `answers`, `over_grpc.GrpcGuard._failure` | all: over HTTP most errors are 400 or 500 |

Only 24.10, which the wheel brings, was tried; what is said of other releases is from the pages that the numbers name.
"""
