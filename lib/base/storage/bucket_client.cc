// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/bucket_client.h"

#include <algorithm>
#include <ctime>

#include "lib/base/io_failure_watch.h"
#include "lib/base/storage/objects.h"
#include "lib/base/storage/sha256.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

struct ErrorAdvice {
  std::string_view code, advice;
};
constexpr const char* kFirstRegion = "us-east-1";

constexpr ErrorAdvice kAdvice[] = {
    {"InvalidAccessKeyId", "the server does not know the access key; check it, the profile and the endpoint"},
    {"SignatureDoesNotMatch", "the secret key does not match the access key; check it"},
    {"ExpiredToken", "the session token has expired; get new credentials"},
    {"TokenRefreshRequired", "the session token has expired; get new credentials"},
    {"InvalidToken", "the session token is not valid; get new credentials"},
    {"AccessDenied", "these credentials may not do this"},
    {"NoSuchBucket", "there is no such bucket at this endpoint; check the name and AWS_ENDPOINT_URL_S3"},
    {"InvalidBucketName", "not a valid bucket name"},
    {"InvalidObjectState", "the object is archived; restore it first"},
    {"PermanentRedirect", "the bucket is in another region; set AWS_REGION"},
    {"AuthorizationHeaderMalformed", "the bucket is in another region; set AWS_REGION"},
};

}  // namespace

std::string BucketClient::code_of(const HttpReply& reply) { return xml_text(reply.body, "Code").value_or(""); }

// The bucket is a part of the host's name at AWS, unless TLS could not prove such a name.
bool BucketClient::is_part_of_host(const S3Access& access) const {
  return access.endpoint.empty() && name_.find('.') == std::string::npos;
}

S3Access BucketClient::access() const {
  const std::lock_guard lock(mutex_);
  return access_;
}

// Gets new keys before those of a role expire. If that fails, the old ones are tried.
void BucketClient::refresh() {
  constexpr std::time_t kBefore = 300;  // seconds
  const std::lock_guard lock(mutex_);
  if (access_.expires == 0 || access_.expires - kBefore > std::time(nullptr)) return;
  auto renewed = root_.starts_with("s3://") ? s3_access() : gs_access();
  if (!renewed || renewed->is_anonymous()) return;
  renewed->region = access_.region;
  access_ = std::move(*renewed);
}

// `body_sum` is the SHA-256 of the body in hex; empty: not known.
HttpRequest BucketClient::http_request(const Request& request, std::string_view body_sum,
                                       const S3Access& access) const {
  const std::string region = access.region.empty() ? kFirstRegion : access.region;
  std::string base = access.endpoint.empty() ? "https://s3." + region + ".amazonaws.com" : access.endpoint;
  if (is_part_of_host(access)) base = "https://" + name_ + ".s3." + region + ".amazonaws.com";
  const HttpUrl parts = split_http_url(base);
  std::string path(parts.target);
  if (!is_part_of_host(access)) path += "/" + percent_encode(name_, false);
  path += request.key.empty() && !path.empty() ? "" : "/" + percent_encode(request.key, true);
  std::string text;
  for (const auto& [name, value] : request.query)
    text += (text.empty() ? "" : "&") + percent_encode(name, false) + "=" + percent_encode(value, false);
  HttpRequest out;
  out.url = std::string(parts.scheme) + "://" + std::string(parts.host) + path + (text.empty() ? "" : "?" + text);
  out.headers = request.headers;
  out.method = request.method;
  out.body = request.body;
  out.into = request.into;
  out.ranged = !request.into.empty();
  if (!access.bearer.empty()) out.headers.emplace_back("authorization", "Bearer " + access.bearer);
  if (access.key_id.empty()) return out;
  out.headers.emplace_back("host", parts.host);
  sign_s3(access, {request.method, path, text, body_sum.empty() ? kUnsignedPayload : body_sum}, std::time(nullptr),
          out.headers);
  return out;
}

namespace {

// Returns the region of the bucket that a reply names, or an empty text.
std::string named_region(const HttpReply& reply) {
  const std::string_view header = reply.header("x-amz-bucket-region");
  return header.empty() ? xml_text(reply.body, "Region").value_or("") : std::string(header);
}

}  // namespace

// Returns the region that the reply to a request for `used` says the bucket is in. If it says only that it is another
// one, asks for the bucket's location. Returns an empty text if the region is not the cause, or stays unknown.
Result<std::string> BucketClient::region_after(const HttpReply& reply, const std::string& used) {
  std::string region = named_region(reply);
  const std::string code = code_of(reply);
  if (!region.empty() || (reply.status != 301 && reply.status != 307 && code != "AuthorizationHeaderMalformed"))
    return region;
  // S3 answers this question in its first region, whatever the bucket's.
  S3Access access = this->access();
  if (!used.empty() && used != kFirstRegion) access.region = kFirstRegion;
  const HttpReply location = TRY(send_http(root_, [&]() -> Result<HttpRequest> {
    return http_request({.query = {{"location", ""}}}, to_hex(sha256("")), access);
  }));
  region = named_region(location);
  if (region.empty()) region = xml_text(location.body, "LocationConstraint").value_or("");
  if (region == "EU") region = "eu-west-1";  // of old buckets
  if (region.empty() && location.status == 200 && access.region != used) region = access.region;
  return region;
}

Result<HttpReply> BucketClient::send(const Request& request, const ShouldRetry& should_retry) {
  refresh();
  // TLS protects the body; without it, the signature must.
  const bool is_plain = access().endpoint.starts_with("http://");
  const std::string sum = request.body.empty() || is_plain ? to_hex(sha256(as_string(request.body))) : std::string();
  for (bool is_first = true;; is_first = false) {
    std::string used;  // region
    const auto make = [&]() -> Result<HttpRequest> {
      const S3Access access = this->access();
      used = access.region;
      return http_request(request, sum, access);
    };
    HttpReply reply = TRY(send_http(root_, make, should_retry));
    if (!is_first || (reply.status != 301 && reply.status != 307 && reply.status != 400 && reply.status != 403))
      return reply;
    const std::string region = TRY(region_after(reply, used));
    const std::lock_guard lock(mutex_);
    if (!region.empty()) access_.region = region;
    if (access_.region == used) return reply;  // another request may have learnt it meanwhile
  }
}

std::string BucketClient::missing_credentials() const {
  return root_.starts_with("s3")
             ? "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
             : "no credentials were found: set GOOGLE_OAUTH_ACCESS_TOKEN, or GS_ACCESS_KEY_ID and "
               "GS_SECRET_ACCESS_KEY";
}

std::string BucketClient::by_whom() const {
  return access_.is_anonymous() ? ", and " + missing_credentials()
                                : " to the key of " + access_.source + "; ask for the right to list the bucket";
}

Error BucketClient::error_of(const HttpReply& reply) const {
  if (reply.status == 401 || reply.status == 403) ++access_denials;
  const std::string code = code_of(reply);
  std::string out = status_text(reply, code, xml_text(reply.body, "Message").value_or(""));
  if (code == "RequestTimeTooSkewed")
    return io_error(out + "; this machine's clock is wrong" +
                    (reply.header("date").empty() ? "" : ": the server has " + printable(reply.header("date"))) +
                    "; set it");
  if (reply.status >= 500) return io_error(out + "; the server failed or is overloaded; try again later");
  if (access_.is_anonymous() && (reply.status == 401 || reply.status == 403))
    return io_error(out + "; " + missing_credentials());
  const auto* const known =
      std::find_if(std::begin(kAdvice), std::end(kAdvice), [&](const ErrorAdvice& a) { return a.code == code; });
  if (known != std::end(kAdvice)) out += "; " + std::string(known->advice);
  if (!access_.is_anonymous()) out += " (credentials: " + access_.source + ")";
  return io_error(out);
}

}  // namespace reshard
