// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/bucket_writer.h"

#include <algorithm>
#include <utility>

#include "lib/base/storage/objects.h"
#include "lib/base/storage/sha256.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::size_t kMd5Digits = 32;

std::string without_quotes(std::string_view etag) {
  if (etag.size() >= 2 && etag.front() == '"' && etag.back() == '"') etag = etag.substr(1, etag.size() - 2);
  return std::string(etag);
}

bool is_hex_text(std::string_view text) { return text.find_first_not_of("0123456789abcdef") == std::string_view::npos; }

bool is_encrypted(const HttpReply& reply) {
  return std::any_of(reply.headers.begin(), reply.headers.end(),
                     [](const auto& header) { return header.first.starts_with("x-amz-server-side-encryption"); });
}

// A success may carry an error in its body: the server sends the status before it knows the result.
bool is_error(const HttpReply& reply) { return reply.status != 200 || xml_text(reply.body, "Code").has_value(); }

bool reports_temporary_failure(const HttpReply& reply) {
  if (reply.status != 200) return false;
  const std::string code = BucketClient::code_of(reply);
  return code == "InternalError" || code == "SlowDown" || code == "ServiceUnavailable";
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '"' ? "&quot;" : std::string(1, c);
  return out;
}

}  // namespace

std::string etag_of_sum(std::string_view sum) { return "\"" + to_hex(sum) + "\""; }

bool is_md5_etag(std::string_view etag) {
  const std::string text = without_quotes(etag);
  return text.size() >= kMd5Digits && is_hex_text(text.substr(0, kMd5Digits)) &&
         (text.size() == kMd5Digits || text[kMd5Digits] == '-');
}

std::string etag_of_parts(const std::vector<std::string>& etags) {
  std::string sums;
  for (const std::string& etag : etags) {
    const std::string digits = without_quotes(etag);
    if (digits.size() != kMd5Digits || !is_hex_text(digits)) return {};
    for (std::size_t i = 0; i < digits.size(); i += 2)
      sums += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  }
  return "\"" + to_hex(md5(sums)) + "-" + std::to_string(etags.size()) + "\"";
}

Error BucketWriter::error_of(const HttpReply& reply, const std::string& key) const {
  return client_.error_of(reply).context(client_.root() + "/" + key);
}

// Sends a PUT and compares the ETag of the reply with the MD5 of the bytes, unless the store says that it encrypts
// them.
Result<std::string> BucketWriter::put_bytes(BucketClient::Request request, const std::string& sum) {
  request.method = "PUT";
  request.headers = {{"content-md5", to_base64(sum)}, {"content-type", "application/octet-stream"}};
  const HttpReply reply = TRY(client_.send(request, [](const HttpReply& r) {
    return reports_temporary_failure(r) || BucketClient::code_of(r) == "BadDigest";  // damaged on the way
  }));
  if (is_error(reply)) return error_of(reply, request.key);
  std::string etag(reply.header("etag"));
  if (without_quotes(etag) != to_hex(sum) && is_md5_etag(etag) && !is_encrypted(reply))
    return io_error(client_.root() + "/" + request.key + ": the server has other bytes than were sent (ETag " +
                    printable(etag) + ", expected " + to_hex(sum) + ")");
  return etag;
}

Result<std::string> BucketWriter::put(const std::string& key, Bytes body) {
  return put_bytes({.key = key, .body = body}, md5(as_string(body)));
}

Result<std::string> BucketWriter::begin_upload(const std::string& key) {
  const HttpReply reply = TRY(client_.send({.method = "POST",
                                            .key = key,
                                            .query = {{"uploads", ""}},
                                            .headers = {{"content-type", "application/octet-stream"}}},
                                           reports_temporary_failure));
  if (is_error(reply)) return error_of(reply, key);
  const auto id = xml_text(reply.body, "UploadId");
  if (!id || id->empty()) return io_error(client_.root() + ": the endpoint answers, but not as S3 does");
  return *id;
}

Result<std::string> BucketWriter::put_part(const std::string& key, const std::string& upload, int number, Bytes bytes,
                                           const std::string& sum) {
  return put_bytes({.key = key, .query = {{"partNumber", std::to_string(number)}, {"uploadId", upload}}, .body = bytes},
                   sum);
}

Result<std::optional<std::vector<StoredPart>>> BucketWriter::parts(const std::string& key, const std::string& upload) {
  std::vector<StoredPart> out;
  BucketClient::Query query = {{"uploadId", upload}};
  while (true) {
    const HttpReply reply = TRY(client_.send({.key = key, .query = query}, reports_temporary_failure));
    if (BucketClient::code_of(reply) == "NoSuchUpload") return std::optional<std::vector<StoredPart>>();
    if (is_error(reply)) return error_of(reply, key);
    for_each_xml(reply.body, "Part", [&](std::string_view item) {
      const auto number = parse_number(xml_text(item, "PartNumber").value_or(""));
      const auto size = parse_number(xml_text(item, "Size").value_or(""));
      if (number && size && *number >= 1 && *number <= kMostParts)
        out.push_back({static_cast<int>(*number), *size, xml_text(item, "ETag").value_or("")});
    });
    const auto next = xml_text(reply.body, "NextPartNumberMarker");
    if (xml_text(reply.body, "IsTruncated") != "true" || !next || query["part-number-marker"] == *next)
      return std::optional(std::move(out));
    query["part-number-marker"] = *next;
  }
}

Result<std::optional<std::string>> BucketWriter::complete_upload(const std::string& key, const std::string& upload,
                                                                 const std::vector<std::string>& etags) {
  std::string body = "<CompleteMultipartUpload>";
  for (std::size_t i = 0; i < etags.size(); ++i)
    body += "<Part><PartNumber>" + std::to_string(i + 1) + "</PartNumber><ETag>" + escaped(etags[i]) + "</ETag></Part>";
  body += "</CompleteMultipartUpload>";
  const HttpReply reply = TRY(client_.send({.method = "POST",
                                            .key = key,
                                            .query = {{"uploadId", upload}},
                                            .headers = {{"content-type", "application/xml"}},
                                            .body = as_bytes(body)},
                                           reports_temporary_failure));
  if (BucketClient::code_of(reply) == "NoSuchUpload") return std::optional<std::string>();
  if (is_error(reply)) return error_of(reply, key);
  return std::optional(xml_text(reply.body, "ETag").value_or(""));
}

Status BucketWriter::abort_upload(const std::string& key, const std::string& upload) {
  const HttpReply reply = TRY(client_.send({.method = "DELETE", .key = key, .query = {{"uploadId", upload}}}));
  if (reply.status == 204 || reply.status == 200 || reply.status == 404) return {};
  return error_of(reply, key);
}

Status BucketWriter::remove(const std::string& key) {
  const HttpReply reply = TRY(client_.send({.method = "DELETE", .key = key}));
  if (reply.status == 204 || reply.status == 200 || reply.status == 404) return {};
  return error_of(reply, key);
}

}  // namespace reshard
