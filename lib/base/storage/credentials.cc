// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/credentials.h"

#include <algorithm>
#include <cstdlib>
#include <map>

#include "lib/base/file.h"
#include "lib/base/machine.h"
#include "lib/base/storage/role_credentials.h"
#include "lib/base/storage/sha256.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

std::string first_variable(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (std::string value = variable(name); !value.empty()) return value;
  return {};
}

std::string home_file(const std::string& name) { return path_join(variable("HOME"), name); }

using Profiles = std::map<std::string, Profile>;

// Adds the sections of an AWS file to `out`, without replacing existing values. A missing file adds nothing.
void add_profiles(const std::string& path, Profiles& out) {
  constexpr Index kMostBytes = Index{1} << 20;
  const auto text = read_whole_file(path, kMostBytes);
  if (!text) return;
  std::string section;
  for (const std::string& line : split(*text, '\n')) {
    const bool is_nested = line.starts_with(' ') || line.starts_with('\t');  // "s3 =" with settings below it
    const std::string plain(trimmed(line));
    if (plain.empty() || plain[0] == '#' || plain[0] == ';') continue;
    if (plain.front() == '[' && plain.back() == ']') {
      section = trimmed(std::string_view(plain).substr(1, plain.size() - 2));
      if (section.starts_with("profile ")) section = trimmed(std::string_view(section).substr(8));
      out[section];
    } else if (const std::size_t equals = plain.find('='); equals != std::string::npos && !is_nested) {
      out[section].emplace(trimmed(plain.substr(0, equals)), trimmed(plain.substr(equals + 1)));
    }
  }
}

std::string without_slash(std::string url) {
  while (url.ends_with('/')) url.pop_back();
  return url;
}

// Returns the settings of the profile; none if there is none.
Result<Profile> fill_from_profile(S3Access& access) {
  const std::string chosen = first_variable({"AWS_PROFILE", "AWS_DEFAULT_PROFILE"});
  const std::string name = chosen.empty() ? "default" : chosen;
  Profiles profiles;
  const auto path_of = [](const char* name_of_variable, const char* usual) {
    const std::string path = variable(name_of_variable);
    return path.empty() ? home_file(usual) : path;
  };
  add_profiles(path_of("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials"), profiles);
  add_profiles(path_of("AWS_CONFIG_FILE", ".aws/config"), profiles);
  const auto found = profiles.find(name);
  if (found == profiles.end()) {
    if (chosen.empty()) return Profile();
    return usage_error("AWS_PROFILE names '" + printable(chosen) +
                       "', which is in neither ~/.aws/credentials nor ~/.aws/config");
  }
  const auto fill = [&](std::string& to, const char* key) {
    if (const auto at = found->second.find(key); to.empty() && at != found->second.end()) to = at->second;
  };
  if (access.key_id.empty()) {
    fill(access.key_id, "aws_access_key_id");
    fill(access.secret, "aws_secret_access_key");
    fill(access.session_token, "aws_session_token");
    if (!access.key_id.empty()) access.source = "profile '" + printable(name) + "'";
  }
  fill(access.region, "region");
  fill(access.endpoint, "endpoint_url");
  return found->second;
}

std::string text_of_date(std::time_t now) { return utc_text(now, "%Y%m%dT%H%M%SZ"); }

}  // namespace

Result<S3Access> s3_access() {
  S3Access out;
  out.key_id = variable("AWS_ACCESS_KEY_ID");
  out.secret = variable("AWS_SECRET_ACCESS_KEY");
  if (out.key_id.empty() != out.secret.empty())
    return usage_error("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY belong together; set both or neither");
  if (!out.key_id.empty()) {
    out.session_token = variable("AWS_SESSION_TOKEN");
    out.source = "AWS_ACCESS_KEY_ID";
  }
  out.region = first_variable({"AWS_REGION", "AWS_DEFAULT_REGION"});
  out.endpoint = first_variable({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"});
  const Profile profile = TRY(fill_from_profile(out));
  if (out.key_id.empty() != out.secret.empty())
    return usage_error(out.source + " has an aws_access_key_id without an aws_secret_access_key");
  out.endpoint = without_slash(out.endpoint);
  if (out.key_id.empty()) TRY(find_role_keys(profile, out));
  return out;
}

Result<S3Access> gs_access() {
  S3Access out;
  out.bearer = variable("GOOGLE_OAUTH_ACCESS_TOKEN");
  out.key_id = variable("GS_ACCESS_KEY_ID");
  out.secret = variable("GS_SECRET_ACCESS_KEY");
  if (out.key_id.empty() != out.secret.empty())
    return usage_error("GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY belong together; set both or neither");
  if (!out.bearer.empty()) out.key_id.clear();
  out.source = !out.bearer.empty() ? "GOOGLE_OAUTH_ACCESS_TOKEN" : !out.key_id.empty() ? "GS_ACCESS_KEY_ID" : "";
  out.region = "auto";
  out.endpoint = without_slash(variable("STORAGE_EMULATOR_HOST"));
  if (!out.endpoint.empty() && out.endpoint.find("://") == std::string::npos) out.endpoint = "http://" + out.endpoint;
  const bool is_emulator = !out.endpoint.empty();
  if (!is_emulator) out.endpoint = "https://storage.googleapis.com";
  const bool asks = !is_emulator || !variable("GCE_METADATA_HOST").empty();
  if (out.is_anonymous() && asks) TRY(find_google_token(out));
  return out;
}

HubAccess hub_access() {
  HubAccess out;
  out.endpoint = without_slash(variable("HF_ENDPOINT"));
  if (out.endpoint.empty()) out.endpoint = "https://huggingface.co";
  out.token = first_variable({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"});
  if (!out.token.empty()) return out;
  std::string file = variable("HF_TOKEN_PATH");
  if (file.empty()) {
    const std::string home = variable("HF_HOME");
    file = home.empty() ? home_file(".cache/huggingface/token") : path_join(home, "token");
  }
  constexpr Index kMostBytes = 4096;
  if (const auto text = read_whole_file(file, kMostBytes)) out.token = trimmed(*text);
  return out;
}

void sign_s3(const S3Access& access, const SignedParts& parts, std::time_t now, HttpHeaders& headers) {
  const std::string time = text_of_date(now), date = time.substr(0, 8);
  headers.emplace_back("x-amz-content-sha256", parts.payload);
  headers.emplace_back("x-amz-date", time);
  if (!access.session_token.empty()) headers.emplace_back("x-amz-security-token", access.session_token);
  std::sort(headers.begin(), headers.end());
  std::string canonical, names;
  for (const auto& [name, value] : headers) {
    canonical.append(name).append(":").append(value).append("\n");
    names.append(names.empty() ? "" : ";").append(name);
  }
  const std::string region = access.region.empty() ? "us-east-1" : access.region;
  const std::string scope = date + "/" + region + "/s3/aws4_request";
  const std::string asked = parts.method + "\n" + parts.path + "\n" + parts.query + "\n" + canonical + "\n" + names +
                            "\n" + std::string(parts.payload);
  const std::string text = "AWS4-HMAC-SHA256\n" + time + "\n" + scope + "\n" + to_hex(sha256(asked));
  std::string key = hmac_sha256("AWS4" + access.secret, date);
  for (const std::string& part : {region, std::string("s3"), std::string("aws4_request")}) key = hmac_sha256(key, part);
  headers.emplace_back("authorization", "AWS4-HMAC-SHA256 Credential=" + access.key_id + "/" + scope +
                                            ", SignedHeaders=" + names +
                                            ", Signature=" + to_hex(hmac_sha256(key, text)));
}

}  // namespace reshard
