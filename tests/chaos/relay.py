"""A TCP relay whose link can be cut or slowed: `python -m tests.chaos.relay LISTEN TARGET CONTROL`.

CONTROL is a JSON file: {"cut": true} closes all connections and takes no new ones, {"rate": N} lets N bytes a
second through each way. It is looked at ten times a second.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

CHUNK = 16 * 1024


class Link:
    def __init__(self, control: Path) -> None:
        self.control = control
        self.cut, self.rate = False, None
        self.open: set[asyncio.StreamWriter] = set()
        self.free_at = {"up": 0.0, "down": 0.0}

    async def watch(self) -> None:
        while True:
            try:
                state = json.loads(self.control.read_text())
            except (OSError, ValueError):
                state = {}
            self.cut, self.rate = bool(state.get("cut")), state.get("rate")
            if self.cut:
                for writer in list(self.open):
                    writer.transport.abort()
            await asyncio.sleep(0.1)

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        try:
            while data := await reader.read(CHUNK):
                if self.rate:
                    start = max(self.free_at[way], time.monotonic())
                    self.free_at[way] = start + len(data) / self.rate
                    await asyncio.sleep(self.free_at[way] - time.monotonic())
                writer.write(data)
                await writer.drain()
        except OSError:  # either side has gone
            pass
        finally:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int) -> None:
        if self.cut:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self.open |= both
        try:
            await asyncio.gather(self.pump(reader, far_writer, "up"), self.pump(far_reader, writer, "down"))
        finally:
            self.open -= both


async def main(listen: int, target: int, control: Path) -> None:
    link = Link(control)
    server = await asyncio.start_server(lambda r, w: link.serve(r, w, target), "127.0.0.1", listen)
    async with server:
        await asyncio.gather(server.serve_forever(), link.watch())


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
