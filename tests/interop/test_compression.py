"""Bodies as RocketMQ 5's Java client compresses them: by the same libraries, called in the same way."""

import base64
import subprocess
from pathlib import Path

import pyspark
import pytest

from metaq.protocol.inflating import inflated
from tests.interop.clients import JVM_FLAGS

JARS = Path(pyspark.__file__).parent / "jars"
SIZES = (0, 1, 5000, 300_000, 5_000_000)
PROGRAM = """
import com.github.luben.zstd.ZstdOutputStream;
import java.io.ByteArrayOutputStream;
import java.io.OutputStream;
import java.util.Base64;
import net.jpountz.lz4.LZ4FrameOutputStream;

public class Compress {
    static void print(ByteArrayOutputStream packed, OutputStream stream, byte[] body) throws Exception {
        stream.write(body);
        stream.flush();
        stream.close();
        System.out.println(Base64.getEncoder().encodeToString(packed.toByteArray()));
    }

    public static void main(String[] sizes) throws Exception {
        for (String size : sizes) {
            byte[] body = new byte[Integer.parseInt(size)];
            for (int at = 0; at < body.length; at++) body[at] = (byte) (at / 3 % 251);
            ByteArrayOutputStream lz4 = new ByteArrayOutputStream(), zstd = new ByteArrayOutputStream();
            print(lz4, new LZ4FrameOutputStream(lz4), body);
            print(zstd, new ZstdOutputStream(zstd, 5), body);
        }
    }
}
"""


@pytest.mark.slow
@pytest.mark.partner("java")
def test_what_java_compresses_is_inflated(tmp_path: Path) -> None:
    """SG-098: LZ4 frames and Zstandard streams of all sizes, which do not say how large they will be."""
    source = tmp_path / "Compress.java"
    source.write_text(PROGRAM, "utf-8")
    command = ["java", *JVM_FLAGS, "-cp", f"{JARS}/*", str(source), *map(str, SIZES)]
    done = subprocess.run(command, capture_output=True, timeout=200, check=True)
    lines = done.stdout.split()
    for number, size in enumerate(SIZES):
        body = bytes(at // 3 % 251 for at in range(size))
        for kind, line in zip((0x101, 0x201), lines[2 * number :], strict=False):
            assert inflated(base64.b64decode(line), kind, max(1, size)) == body
