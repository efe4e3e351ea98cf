"""How the synchronous client keeps connections."""

from __future__ import annotations

import json
import subprocess
import sys

SERVER = """
import json, os, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from service.client import Client

class Ports(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = json.dumps({"models": [self.client_address[1]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Ports)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = Client(f"http://127.0.0.1:{server.server_port}", timeout=5)
ports = [client.models(), client.models()]
reading, writing = os.pipe()
if os.fork() == 0:
    try:
        os.write(writing, json.dumps([client.models(), client.models()]).encode())
    finally:
        os._exit(0)
os.close(writing)
print(json.dumps([ports + [client.models()], json.loads(os.read(reading, 4096))]))
"""


def test_a_forked_process_has_a_connection_of_its_own():
    """As the workers of a DataLoader: on a shared one, each process would read the responses to the other."""
    run = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    parent, child = json.loads(run.stdout)
    assert parent == [parent[0]] * 3
    assert child == [child[0]] * 2
    assert child[0] != parent[0]
