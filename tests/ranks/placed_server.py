"""A server on a cluster, for `test_cluster_runs.py`: `placed_server.py ADDRESS FOLDER` prints two lines of JSON.

The first is about a server that is started, answers, is killed and is started again. The second says whether it is
still running after the test has killed its raylet.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from gspo.cluster import connect
from gspo.rollout.vllm.http import Client
from gspo.rollout.vllm.placed_server import ServerPlaces

FAKE = """
import http.server, json, os, sys
arguments = sys.argv[1:]
host, port = (arguments[arguments.index(name) + 1] for name in ("--host", "--port"))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        allowed = self.headers["Authorization"] == "Bearer " + os.environ["GSPO_SERVE_TOKEN"]
        with open(os.path.join(arguments[1], "config.json")) as file:
            body = {"pid": os.getpid(), "config": json.load(file)}
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

print("a line of the server", flush=True)
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""
LIMIT_S = 120.0


def main(address: str, folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "any"}')
    with connect.joined(address, namespace="servers") as ray:
        # Room for two, on two nodes: one of them is taken by nobody.
        group = ray.util.placement_group([{"CPU": 2}] * 2, strategy="STRICT_SPREAD", name="places")
        assert group.wait(timeout_seconds=60)
        table = ray.util.placement_group_table(group)["bundles_to_node_id"]
        own = ray.get_runtime_context().get_node_id()
        (place,) = [place for place, node in table.items() if node != own]
        cluster = {
            "address": address,
            "namespace": "servers",
            "servers": "places",
            "server_places": 2,
            "server_gpus": 0,
        }
        server = ServerPlaces(cluster).server(place, folder, experts=False, more=[])
        found = []
        for _ in range(2):
            server.start()
            server.wait_ready(LIMIT_S)
            found.append(Client(server.address, server.token).get("/health", timeout_s=LIMIT_S))
            os.kill(found[-1]["pid"], signal.SIGKILL)
            until = time.monotonic() + LIMIT_S
            while server.running and time.monotonic() < until:
                time.sleep(0.02)
        server.start()
        server.wait_ready(LIMIT_S)
        print(json.dumps({"found": found, "log": server.log.read_text()}), flush=True)
        until = time.monotonic() + LIMIT_S
        while server.running and time.monotonic() < until:
            time.sleep(0.02)
        print(json.dumps(server.running), flush=True)
        server.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
