// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), to sign requests to S3, and MD5 (RFC 1321), by which S3 names what it
// stored. MD5 finds damage here, it is no protection.
#pragma once

#include <string>
#include <string_view>

namespace reshard {

std::string sha256(std::string_view message);                             // 32 bytes
std::string hmac_sha256(std::string_view key, std::string_view message);  // 32 bytes
std::string md5(std::string_view message);                                // 16 bytes
std::string to_base64(std::string_view bytes);
std::string to_hex(std::string_view bytes);  // two lower-case digits for each

}  // namespace reshard
