// SPDX-License-Identifier: Apache-2.0
// Buckets behind the S3 protocol: AWS, MinIO, Ceph, Swift, R2, and Google Cloud Storage's XML interface.
#include <algorithm>
#include <map>

#include "lib/base/storage/credentials.h"
#include "lib/base/storage/objects.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

using Query = std::map<std::string, std::string>;  // sorted by name, as signatures require

struct ErrorAdvice {
  std::string_view code, advice;
};
constexpr ErrorAdvice kAdvice[] = {
    {"InvalidAccessKeyId", "the server does not know the access key; check it, the profile and the endpoint"},
    {"SignatureDoesNotMatch", "the secret key does not match the access key; check it"},
    {"ExpiredToken", "the session token has expired; get new credentials"},
    {"TokenRefreshRequired", "the session token has expired; get new credentials"},
    {"InvalidToken", "the session token is not valid; get new credentials"},
    {"AccessDenied", "these credentials may not read this"},
    {"NoSuchBucket", "there is no such bucket at this endpoint; check the name and AWS_ENDPOINT_URL_S3"},
    {"InvalidBucketName", "not a valid bucket name"},
    {"InvalidObjectState", "the object is archived; restore it first"},
    {"PermanentRedirect", "the bucket is in another region; set AWS_REGION"},
    {"AuthorizationHeaderMalformed", "the bucket is in another region; set AWS_REGION"},
};

class Bucket : public Storage {
 public:
  Bucket(std::string root, std::string name, S3Access access)
      : root_(std::move(root)), name_(std::move(name)), access_(std::move(access)) {}

  Result<Listing> list(const std::string& key) override {
    Listing out;
    const std::string prefix = key.empty() ? "" : key + "/";
    Query query = {{"list-type", "2"}, {"delimiter", "/"}, {"prefix", prefix}};
    while (true) {
      const HttpReply reply = TRY(send("", query, {}, {}, [](const HttpReply& r) {
        return r.status == 200 && xml_text(r.body, "Error").has_value();
      }));
      if (reply.status == 403 && code_of(reply) == "AccessDenied") {
        out.is_allowed = false;
        out.why_not = "listing is denied" + by_whom() + "; or name a file that may be read, such as a model's index";
        return out;
      }
      if (reply.status != 200) return error_of(reply).context(root_ + "/" + key);
      if (!xml_text(reply.body, "IsTruncated")) return io_error(root_ + ": the endpoint answers, but not as S3 does");
      add_objects(reply.body, prefix, out.objects);
      const auto next = xml_text(reply.body, "NextContinuationToken");
      if (xml_text(reply.body, "IsTruncated") != "true" || !next) return out;
      query["continuation-token"] = *next;
    }
  }

  Result<std::optional<StoredObject>> stat(const std::string& key) override {
    std::byte first{};
    HttpHeaders range;
    add_range(range, 0, 1, "");
    const HttpReply reply = TRY(send(key, {}, range, {&first, 1}));
    if (auto object = object_of(reply, base_name(key))) return object;
    const std::string code = code_of(reply);
    const bool is_none =
        (reply.status == 404 && code != "NoSuchBucket") || (reply.status == 403 && code == "AccessDenied");
    if (is_none) return std::optional<StoredObject>();
    return error_of(reply).context(root_ + "/" + key);
  }

  Status read(const std::string& key, const StoredObject& object, Index offset, MutableBytes out) override {
    HttpHeaders range;
    add_range(range, offset, std::ssize(out), object.version);
    const HttpReply reply = TRY(send(key, {}, range, out));
    if (!TRY(check_range(reply, object, offset))) return error_of(reply);
    return {};
  }

 private:
  static std::string code_of(const HttpReply& reply) { return xml_text(reply.body, "Code").value_or(""); }

  static void add_objects(std::string_view xml, const std::string& prefix, std::vector<StoredObject>& out) {
    const auto name_of = [&](const std::optional<std::string>& key) {
      return key && key->starts_with(prefix) ? key->substr(prefix.size()) : "";
    };
    for_each_xml(xml, "Contents", [&](std::string_view item) {
      const std::string name = name_of(xml_text(item, "Key"));
      if (name.empty()) return;  // the directory's own marker
      const auto size = parse_number(xml_text(item, "Size").value_or(""));
      out.push_back({{name, false, size.value_or(0), parse_time(xml_text(item, "LastModified").value_or(""))},
                     xml_text(item, "ETag").value_or("")});
    });
    for_each_xml(xml, "CommonPrefixes", [&](std::string_view item) {
      std::string name = name_of(xml_text(item, "Prefix"));
      if (name.ends_with('/')) name.pop_back();
      if (!name.empty()) out.push_back(directory_object(std::move(name)));
    });
  }

  // Returns whether the bucket is part of the host name, as at AWS. A bucket with a dot is not: AWS's certificate does
  // not cover such host names.
  bool is_part_of_host(const S3Access& access) const {
    return access.endpoint.empty() && name_.find('.') == std::string::npos;
  }

  HttpRequest request_for(const std::string& key, const Query& query, const HttpHeaders& range, MutableBytes into) {
    S3Access access;
    {
      const std::lock_guard lock(mutex_);
      access = access_;
    }
    const std::string region = access.region.empty() ? "us-east-1" : access.region;
    std::string base = access.endpoint.empty() ? "https://s3." + region + ".amazonaws.com" : access.endpoint;
    if (is_part_of_host(access)) base = "https://" + name_ + ".s3." + region + ".amazonaws.com";
    const HttpUrl parts = split_http_url(base);
    std::string path(parts.target);
    if (!is_part_of_host(access)) path += "/" + percent_encode(name_, false);
    path += key.empty() && !path.empty() ? "" : "/" + percent_encode(key, true);
    std::string text;
    for (const auto& [name, value] : query)
      text += (text.empty() ? "" : "&") + percent_encode(name, false) + "=" + percent_encode(value, false);
    HttpRequest out;
    out.url = std::string(parts.scheme) + "://" + std::string(parts.host) + path + (text.empty() ? "" : "?" + text);
    out.headers = range;
    out.into = into;
    out.ranged = !into.empty();
    if (!access.bearer.empty()) out.headers.emplace_back("authorization", "Bearer " + access.bearer);
    if (access.key_id.empty()) return out;
    out.headers.emplace_back("host", parts.host);
    sign_s3(access, path, text, std::time(nullptr), out.headers);
    return out;
  }

  // Sends a GET. If the server reports that the bucket is in another region, this and later requests go to that region.
  Result<HttpReply> send(const std::string& key, const Query& query, const HttpHeaders& range, MutableBytes into,
                         const IsTrouble& is_trouble = nullptr) {
    for (bool is_first = true;; is_first = false) {
      HttpReply reply = TRY(send_http(
          root_, [&]() -> Result<HttpRequest> { return request_for(key, query, range, into); }, is_trouble));
      if (!is_first || (reply.status != 301 && reply.status != 307 && reply.status != 400 && reply.status != 403))
        return reply;
      std::string region(reply.header("x-amz-bucket-region"));
      if (region.empty()) region = xml_text(reply.body, "Region").value_or("");
      const std::lock_guard lock(mutex_);
      if (region.empty() || region == access_.region) return reply;
      access_.region = region;
    }
  }

  std::string missing_credentials() const {
    return root_.starts_with("s3")
               ? "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
               : "no credentials were found: set GOOGLE_OAUTH_ACCESS_TOKEN, or GS_ACCESS_KEY_ID and "
                 "GS_SECRET_ACCESS_KEY";
  }

  std::string by_whom() const {
    return access_.is_anonymous() ? ", and " + missing_credentials()
                                  : " to the key of " + access_.source + "; ask for the right to list the bucket";
  }

  Error error_of(const HttpReply& reply) const {
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

  const std::string root_, name_;
  mutable std::mutex mutex_;
  S3Access access_;  // `region` is guarded by the mutex
};

}  // namespace

Result<std::unique_ptr<Storage>> open_bucket(const std::string& root) {
  const std::string name = root.substr(5);
  if (name.empty()) return usage_error(root + ": expected a bucket, as in " + root + "bucket/directory");
  S3Access access = TRY(root.starts_with("s3://") ? s3_access() : gs_access());
  if (!access.endpoint.empty() && split_http_url(access.endpoint).host.empty())
    return usage_error("'" + printable(access.endpoint) +
                       "' is not an endpoint; expected a URL such as http://host:9000");
  return std::unique_ptr<Storage>(std::make_unique<Bucket>(root, name, std::move(access)));
}

}  // namespace reshard
