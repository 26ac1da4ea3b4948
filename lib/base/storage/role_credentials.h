// SPDX-License-Identifier: Apache-2.0
// Keys that expire, of the roles of machines, containers and identity tokens, and of programs that hand out keys.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/result.h"
#include "lib/base/storage/s3_access.h"

namespace reshard {

using Profile = std::map<std::string, std::string>;  // settings of a profile in AWS's files

// Finds keys for S3 in the sources that the AWS tools try after variables and profiles: a web identity token
// (AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE, or the profile's), the profile's credential_process, the container
// (AWS_CONTAINER_CREDENTIALS_*), and the machine (IMDSv2). Returns false if there is none. Fails if one is configured
// and does not work.
Result<bool> find_role_keys(const Profile& profile, S3Access& access);

// Finds a token for GCS: of the application default credentials that `gcloud auth application-default login` writes, or
// of the machine. Returns false if there is none.
Result<bool> find_google_token(S3Access& access);

// Returns the token files that are read again when keys are renewed, which a sandbox must allow.
std::vector<std::string> token_files();

}  // namespace reshard
