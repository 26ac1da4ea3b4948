// SPDX-License-Identifier: Apache-2.0
// Credentials and endpoints, from where the AWS, Google and Hugging Face tools keep them. They are read once, when the
// first URL of their kind is opened, and never appear in a message.
#pragma once

#include <ctime>
#include <string>
#include <string_view>

#include "lib/base/result.h"
#include "lib/base/storage/http.h"
#include "lib/base/storage/s3_access.h"

namespace reshard {

// Reads the AWS_* variables, or the profile (AWS_PROFILE) in ~/.aws/credentials and ~/.aws/config, or else asks for the
// keys of a role (role_credentials.h). Fails (usage) if the profile does not exist or only half of a key is set.
Result<S3Access> s3_access();
// Reads GOOGLE_OAUTH_ACCESS_TOKEN, or an HMAC key from GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY, or else asks for a
// token (role_credentials.h); and the endpoint from STORAGE_EMULATOR_HOST.
Result<S3Access> gs_access();

struct HubAccess {
  std::string token, endpoint;
};
// Reads HF_TOKEN, or the file that `hf auth login` writes, and HF_ENDPOINT.
HubAccess hub_access();

// Signs a request for `path` and `query` at the time `now` by adding headers: AWS Signature Version 4 for S3. Both are
// percent-encoded, the query's parameters are sorted, and `headers` already contains `host`. `payload` is the SHA-256
// of the body in hex, or kUnsignedPayload.
inline constexpr std::string_view kUnsignedPayload = "UNSIGNED-PAYLOAD";
struct SignedParts {
  const std::string &method, &path, &query;
  std::string_view payload;
};
void sign_s3(const S3Access& access, const SignedParts& parts, std::time_t now, HttpHeaders& headers);

}  // namespace reshard
