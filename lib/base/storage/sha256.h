// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4), of files, and with HMAC (RFC 2104) to sign requests to S3; and MD5 (RFC 1321), which S3's
// ETags are made of. MD5 detects damage here; it protects from nobody.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace reshard {

// The SHA-256 of a message that comes in parts.
class Sha256 {
 public:
  void add(std::string_view part);
  std::string digest();  // 32 bytes; ends the message

 private:
  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string rest_;  // of the parts, less than a block
  std::uint64_t bytes_ = 0;
};
std::string sha256(std::string_view message);                             // 32 bytes
std::string hmac_sha256(std::string_view key, std::string_view message);  // 32 bytes
std::string md5(std::string_view message);                                // 16 bytes
std::string to_base64(std::string_view bytes);
std::string to_hex(std::string_view bytes);  // two lower-case digits for each

}  // namespace reshard
