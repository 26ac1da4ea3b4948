"""Stands between a client and a server as a link of limited bandwidth and of some latency, which this kernel may lack.

    python3 tests/storage/shaping_proxy.py HOST PORT [--rate MBIT] [--delay MS]

Prints its port. All connections share the bandwidth, each direction has its own, and each byte arrives half the delay
later than it was sent: a request and its reply take one delay more. A connection is set up without any.
"""
import argparse
import asyncio
import collections
import time

PIECE = 64 << 10  # bytes that are read at a time
MOST = 4 << 20  # bytes of one direction of a connection that are under way


class Link:
    """One direction. Says when bytes that are sent now will have arrived."""

    def __init__(self, rate, delay):
        self.rate, self.delay, self.free_at = rate, delay, 0.0

    def arrival(self, length):
        now = time.monotonic()
        self.free_at = max(self.free_at, now) + (length / self.rate if self.rate else 0)
        return self.free_at + self.delay


async def forward(reader, writer, link):
    under_way, held, changed, is_over = collections.deque(), 0, asyncio.Event(), False

    async def deliver():
        nonlocal held
        while under_way or not is_over:
            if not under_way:
                changed.clear()
                await changed.wait()
                continue
            when, data = under_way.popleft()
            if (left := when - time.monotonic()) > 0:
                await asyncio.sleep(left)
            writer.write(data)
            await writer.drain()
            held -= len(data)
            changed.set()

    delivering = asyncio.create_task(deliver())
    try:
        while data := await reader.read(PIECE):
            under_way.append((link.arrival(len(data)), data))
            held += len(data)
            changed.set()
            while held > MOST and not delivering.done():
                changed.clear()
                await changed.wait()
    except ConnectionError:
        pass
    is_over = True
    changed.set()
    try:
        await delivering
        writer.write_eof()
    except (ConnectionError, OSError):
        writer.close()


async def serve(options):
    # Bits to bytes, and half the delay each way.
    there, back = (Link(options.rate * 1e6 / 8, options.delay / 2e3) for _ in range(2))

    async def connected(reader, writer):
        try:
            server_reader, server_writer = await asyncio.open_connection(options.host, options.port)
        except OSError:
            return writer.close()
        await asyncio.gather(forward(reader, server_writer, there), forward(server_reader, writer, back))
        for each in (writer, server_writer):
            each.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=MOST, backlog=128)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--rate", type=float, default=0, help="Mbit/s each way (default: no limit)")
    parser.add_argument("--delay", type=float, default=0, help="milliseconds there and back")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
