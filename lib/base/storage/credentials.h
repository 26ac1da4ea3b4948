// SPDX-License-Identifier: Apache-2.0
// Who reads a bucket or a repository: credentials and endpoints where the AWS, Google and Hugging Face tools keep them.
// They are read once, when the first URL of their kind is opened, and appear in no message.
#pragma once

#include <ctime>
#include <string>

#include "lib/base/result.h"
#include "lib/base/storage/http.h"

namespace reshard {

// How requests to an S3 or GCS bucket are sent. Without a key and a token they are anonymous.
struct S3Access {
  std::string key_id, secret, session_token;
  std::string bearer;    // of GCS, in the place of the three
  std::string region;    // empty: unknown
  std::string endpoint;  // "https://host[:port][/path]" without a slash at its end; empty: AWS's own
  std::string source;    // of the key, for messages: "AWS_ACCESS_KEY_ID", "profile 'x'"; empty: anonymous
  bool is_anonymous() const { return key_id.empty() && bearer.empty(); }
};
// From the AWS_* variables, or the profile (AWS_PROFILE) of ~/.aws/credentials and ~/.aws/config. A usage error if
// AWS_PROFILE names none, or half of a key is set.
Result<S3Access> s3_access();
// Of Google: GOOGLE_OAUTH_ACCESS_TOKEN, or an HMAC key in GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY; the endpoint of
// STORAGE_EMULATOR_HOST.
Result<S3Access> gs_access();

struct HubAccess {
  std::string token, endpoint;
};
// HF_TOKEN or the file that `hf auth login` writes; HF_ENDPOINT.
HubAccess hub_access();

// Adds to `headers`, which `host` is among, what signs a GET of `path` and `query` (both percent-encoded, the query's
// parameters in order) at the time `now`: AWS Signature Version 4 for S3.
void sign_s3(const S3Access& access, const std::string& path, const std::string& query, std::time_t now,
             HttpHeaders& headers);

}  // namespace reshard
