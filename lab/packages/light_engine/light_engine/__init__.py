"""A stand-in for an engine: it speaks the HTTP API of an SGLang worker, and there is no model behind it.

It is there so that units, roles, routers and gates can be tried in seconds on hosts that have no GPU and no
room for the engine. Nothing that it does is evidence about SGLang, NIXL or a KV cache. It says so at every
start.

    python -m light_engine <flags of sglang.launch_server>

What it does like the engine (sglang 0.5.23, as read in its source and seen on a CPU; see docs):
- a main process with the HTTP port, and a child ("scheduler") that every answer passes through: SIGSTOP it
  and requests hang, kill it and the main process kills everything that is left, itself included, with
  SIGKILL;
- the port opens when loading is over; /ready and /health are 503 until warm-up is over, and again once
  SIGTERM has come. On SIGTERM it finishes what is in flight, still takes new requests meanwhile, and ends;
- prefill: the bootstrap server on its own port, up before loading, with /health and /route (503 until every
  rank has registered); a taken port is logged and otherwise ignored, so that only `prefill_http_port` of
  /route shows it;
- prefill and decode: a request without bootstrap room is refused with 400. With one, decode fetches from
  the prefill what it answers from; without a living prefill that request ends in 500 or hangs until the
  waiting time-out;
- a decode whose page size differs from the prefill's dies at the first request;
- killed, it leaves a segment in /dev/shm behind.

Settings, all from the environment:
- LIGHT_ENGINE_FLAGS: path of a flags.json; with it, unknown flags and wrong choices are refused as the
  engine does;
- LIGHT_ENGINE_START_DELAY, LIGHT_ENGINE_WARMUP_DELAY: seconds (0) of loading and of warm-up;
- LIGHT_ENGINE_TOKEN_DELAY: seconds (0) before each piece of an answer;
- LIGHT_ENGINE_STOP_DELAY: seconds (0) between the last request in flight and the end, after SIGTERM;
- LIGHT_ENGINE_STOP_SIGNAL: how it ends after SIGTERM: "kill" (default), by SIGKILL as sglang 0.5.16 did on a GPU, or
  "exit", with status 0 as 0.5.23 did on a CPU;
- LIGHT_ENGINE_DIE: "exit" (status 1), "kill" (SIGKILL), "scheduler" (SIGSEGV of the child) or "hang"
  (SIGSTOP of the child), LIGHT_ENGINE_DIE_WHEN: seconds after it became ready, or "starting" (default) for
  the end of loading;
- LIGHT_ENGINE_ORPHANS=1: the scheduler outlives a main process that was killed;
- LIGHT_ENGINE_WRONG=1: answers come out backwards;
- SGLANG_DISAGGREGATION_WAITING_TIMEOUT, SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT (300 s) and
  SGLANG_HEALTH_CHECK_TIMEOUT (20 s): as in the engine. LIGHT_ENGINE_HANDSHAKE_TIMEOUT: seconds (15) that
  decode tries to reach a prefill.
"""
