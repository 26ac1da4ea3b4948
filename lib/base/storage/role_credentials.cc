// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/role_credentials.h"

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/sandbox.h"
#include "lib/base/storage/http.h"
#include "lib/base/storage/objects.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr Index kMostOfAnswer = Index{1} << 20;

std::string environment_value(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

std::string setting(const Profile& profile, const std::string& name) {
  const auto at = profile.find(name);
  return at == profile.end() ? "" : at->second;
}

// Asks a service of this machine, which answers at once or is not there.
std::optional<HttpReply> ask_machine(HttpRequest request) {
  request.is_local = true;
  HttpOutcome outcome = send_once(request);
  auto* const reply = std::get_if<HttpReply>(&outcome);
  if (!reply || reply->status != 200) return std::nullopt;
  return std::move(*reply);
}

// Takes the keys of an answer as containers, machines and programs give it. Never shows the answer: it has secrets.
Status take_keys(std::string_view text, const std::string& source, const char* token_name, S3Access& access) {
  const auto json = parse_json(text, source);
  const auto id = json ? json->get_string("AccessKeyId") : Result<std::string_view>(json.error());
  const auto secret = json ? json->get_string("SecretAccessKey") : Result<std::string_view>(json.error());
  if (!id || !secret) return io_error(source + ": expected JSON with AccessKeyId and SecretAccessKey");
  access.key_id = *id;
  access.secret = *secret;
  if (const auto token = json->get_string(token_name)) access.session_token = *token;
  if (const auto until = json->get_string("Expiration")) access.expires = parse_time(*until) / 1'000'000'000;
  access.source = source;
  return {};
}

// Exchanges the token of an identity provider, as clusters mount it into pods, for the keys of a role.
Result<bool> ask_web_identity(const Profile& profile, S3Access& access) {
  std::string file = environment_value("AWS_WEB_IDENTITY_TOKEN_FILE"), role = environment_value("AWS_ROLE_ARN");
  if (file.empty()) file = setting(profile, "web_identity_token_file"), role = setting(profile, "role_arn");
  if (file.empty() || role.empty()) return false;
  const std::string source = "web identity token",
                    token(trimmed(TRY(read_whole_file(file, kMostOfAnswer).context(source))));
  std::string name = environment_value("AWS_ROLE_SESSION_NAME"), endpoint = environment_value("AWS_ENDPOINT_URL_STS");
  if (name.empty()) name = "reshard";
  const std::string region = access.region.empty() ? "us-east-1" : access.region;
  if (endpoint.empty()) endpoint = "https://sts." + region + ".amazonaws.com";
  const std::string body =
      "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn=" + percent_encode(role, false) +
      "&RoleSessionName=" + percent_encode(name, false) + "&WebIdentityToken=" + percent_encode(token, false);
  const HttpReply reply = TRY(send_http(source, [&]() -> Result<HttpRequest> {
    return HttpRequest{.url = endpoint + "/",
                       .headers = {{"content-type", "application/x-www-form-urlencoded"}},
                       .method = "POST",
                       .body = as_bytes(body)};
  }));
  const auto text = [&](const char* element) { return xml_text(reply.body, element).value_or(""); };
  if (reply.status != 200)
    return io_error(source + ": " + status_text(reply, text("Code"), text("Message")) + "; check AWS_ROLE_ARN");
  access.key_id = text("AccessKeyId");
  access.secret = text("SecretAccessKey");
  access.session_token = text("SessionToken");
  access.expires = parse_time(text("Expiration")) / 1'000'000'000;
  access.source = source;
  if (access.key_id.empty() || access.secret.empty()) return io_error(source + ": the service sent no keys");
  return true;
}

// Runs the program of a profile. The sandbox runs none, so its keys must last for the whole run.
Result<bool> ask_process(const Profile& profile, S3Access& access) {
  const std::string command = setting(profile, "credential_process"), source = "credential_process";
  if (command.empty() || in_sandbox()) return false;
  const auto close = [](std::FILE* pipe) { ::pclose(pipe); };
  std::unique_ptr<std::FILE, decltype(close)> pipe(::popen(command.c_str(), "re"), close);
  if (!pipe) return io_error(source + ": cannot be started");
  std::string out;
  std::array<char, 4096> part{};
  for (std::size_t n = 0; (n = std::fread(part.data(), 1, part.size(), pipe.get())) > 0;)
    if (out.size() < std::size_t{kMostOfAnswer}) out.append(part.data(), n);
  const int status = ::pclose(pipe.release());
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return io_error(source + ": the program of the profile failed; run it by hand to see why");
  TRY(take_keys(out, source, "SessionToken", access));
  return true;
}

// Hosts that may be sent the container's authorization without TLS, as AWS's tools have them.
bool is_hosts_own(std::string_view host) {
  const std::string_view name =
      host.starts_with('[') ? host.substr(0, host.find(']') + 1) : host.substr(0, host.find(':'));
  for (const char* own : {"169.254.170.2", "169.254.170.23", "[fd00:ec2::23]", "127.0.0.1", "[::1]", "localhost"})
    if (name == own) return true;
  return false;
}

Result<bool> ask_container(S3Access& access) {
  const std::string relative = environment_value("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"), source = "container";
  std::string url =
      relative.empty() ? environment_value("AWS_CONTAINER_CREDENTIALS_FULL_URI") : "http://169.254.170.2" + relative;
  if (url.empty()) return false;
  const HttpUrl parts = split_http_url(url);
  if (parts.scheme != "https" && !is_hosts_own(parts.host))
    return usage_error("AWS_CONTAINER_CREDENTIALS_FULL_URI: expected https, or a host of this machine");
  std::string token = environment_value("AWS_CONTAINER_AUTHORIZATION_TOKEN");
  if (const std::string file = environment_value("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); !file.empty())
    token = trimmed(TRY(read_whole_file(file, kMostOfAnswer)));
  HttpRequest request{.url = std::move(url)};
  if (!token.empty()) request.headers.emplace_back("authorization", token);
  const auto reply = ask_machine(std::move(request));
  if (!reply) return io_error("the container's credentials (AWS_CONTAINER_CREDENTIALS_*) cannot be fetched");
  TRY(take_keys(reply->body, source, "Token", access));
  return true;
}

// Asks the instance metadata service, version 2.
Result<bool> ask_instance(S3Access& access) {
  if (environment_value("AWS_EC2_METADATA_DISABLED") == "true") return false;
  std::string base = environment_value("AWS_EC2_METADATA_SERVICE_ENDPOINT");
  while (base.ends_with('/')) base.pop_back();
  if (base.empty()) base = "http://169.254.169.254";
  const auto token = ask_machine({.url = base + "/latest/api/token",
                                  .headers = {{"x-aws-ec2-metadata-token-ttl-seconds", "21600"}},
                                  .method = "PUT"});
  if (!token) return false;
  const HttpHeaders with_token = {{"x-aws-ec2-metadata-token", std::string(trimmed(token->body))}};
  const std::string roles = base + "/latest/meta-data/iam/security-credentials/";
  const auto role = ask_machine({.url = roles, .headers = with_token});
  if (!role) return false;  // a machine without a role
  const std::string name(trimmed(std::string_view(role->body).substr(0, role->body.find('\n'))));
  const auto keys = ask_machine({.url = roles + percent_encode(name, false), .headers = with_token});
  if (!keys) return io_error("the keys of this machine's role cannot be fetched");
  TRY(take_keys(keys->body, "this machine's role", "Token", access));
  return true;
}

Status take_token(const HttpReply& reply, const std::string& source, S3Access& access) {
  const auto json = parse_json(reply.body, source);
  const auto token = json ? json->get_string("access_token") : Result<std::string_view>(json.error());
  if (!token) return io_error(source + ": the service sent no token");
  access.bearer = *token;
  access.source = source;
  if (const auto seconds = json->get_index("expires_in")) access.expires = std::time(nullptr) + *seconds;
  return {};
}

// Exchanges the refresh token of a user for an access token.
Result<bool> ask_google_user(S3Access& access) {
  const std::string given = environment_value("GOOGLE_APPLICATION_CREDENTIALS"),
                    source = "application default credentials";
  const std::string file =
      given.empty() ? path_join(environment_value("HOME"), ".config/gcloud/application_default_credentials.json")
                    : given;
  const auto text = read_whole_file(file, kMostOfAnswer);
  if (!text && given.empty()) return false;
  const Json json = TRY(parse_json(TRY(text), source));
  const auto type = json.get_string("type");
  if (!type || *type != "authorized_user")
    return unsupported(source +
                       ": only those of a user (gcloud auth application-default login) are read; set "
                       "GOOGLE_OAUTH_ACCESS_TOKEN to what `gcloud auth print-access-token` prints");
  std::string body = "grant_type=refresh_token";
  for (const char* name : {"client_id", "client_secret", "refresh_token"})
    body += "&" + std::string(name) + "=" + percent_encode(TRY(json.get_string(name)), false);
  const auto given_uri = json.get_string("token_uri");
  const std::string url(given_uri ? *given_uri : "https://oauth2.googleapis.com/token");
  const HttpReply reply = TRY(send_http(source, [&]() -> Result<HttpRequest> {
    return HttpRequest{.url = url,
                       .headers = {{"content-type", "application/x-www-form-urlencoded"}},
                       .method = "POST",
                       .body = as_bytes(body)};
  }));
  if (reply.status != 200)
    return io_error(source + ": " + status_text(reply, "", "") + "; run gcloud auth application-default login again");
  TRY(take_token(reply, source, access));
  return true;
}

Result<bool> ask_google_machine(S3Access& access) {
  std::string host = environment_value("GCE_METADATA_HOST");
  if (environment_value("NO_GCE_CHECK") == "true") return false;
  if (host.empty()) host = "169.254.169.254";
  const auto reply =
      ask_machine({.url = "http://" + host + "/computeMetadata/v1/instance/service-accounts/default/token",
                   .headers = {{"metadata-flavor", "Google"}}});
  if (!reply) return false;
  TRY(take_token(*reply, "this machine's service account", access));
  return true;
}

}  // namespace

std::vector<std::string> token_files() {
  std::vector<std::string> out;
  for (const char* name : {"AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"})
    if (std::string file = environment_value(name); !file.empty()) out.push_back(std::move(file));
  return out;
}

Result<bool> find_role_keys(const Profile& profile, S3Access& access) {
  if (TRY(ask_web_identity(profile, access))) return true;
  if (TRY(ask_process(profile, access))) return true;
  for (const char* name : {"sso_session", "sso_start_url", "source_profile"})
    if (!setting(profile, name).empty())
      return unsupported("the profile has " + std::string(name) +
                         ", which is not read; run eval \"$(aws configure export-credentials --format env)\"");
  if (TRY(ask_container(access))) return true;
  return ask_instance(access);
}

Result<bool> find_google_token(S3Access& access) {
  if (TRY(ask_google_user(access))) return true;
  return ask_google_machine(access);
}

}  // namespace reshard
