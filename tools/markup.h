// SPDX-License-Identifier: Apache-2.0
// Text for HTML and XML.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace reshard::tools {

// Returns printable text for an element or a quoted attribute of HTML or of XML 1.0, which forbids control bytes, bytes
// that are not UTF-8, U+FFFE and U+FFFF.
std::string markup_escaped(std::string_view text);

// A cell of an HTML table.
struct HtmlCell {
  std::string html;  // escaped
  std::string sort;  // the value to sort by and to export; empty: the text of the cell
};
HtmlCell text_cell(std::string_view text);
HtmlCell name_cell(std::string_view name);  // in the font of code
HtmlCell count_cell(long long n);           // "1,024"
HtmlCell bytes_cell(long long n);           // "3.00 GB"
HtmlCell real_cell(double x);               // four significant digits; "not finite"

// Builds the HTML of a table row by row. A head that begins with "#" makes a column of numbers. After kMostRows rows
// only counts them, and says so below the table.
class HtmlTable {
 public:
  static constexpr std::size_t kMostRows = 5000;
  // `name`: for people and for the file that the table is exported to, "tensors".
  HtmlTable(std::string_view name, const std::vector<std::string>& heads);
  // `id` is the row's anchor; empty: none.
  void add(const std::vector<HtmlCell>& cells, std::string_view id = {});
  std::size_t rows() const { return rows_; }
  std::string html() const;

 private:
  std::string name_, head_, body_;
  std::vector<bool> is_number_;
  std::size_t rows_ = 0;
};

// Returns a section with a heading; nothing if `content` is empty. `content` is HTML.
std::string html_section(std::string_view title, const std::string& content);
// Returns a list of at most `most` texts and the number of the others; nothing if there are none.
std::string html_list(const std::vector<std::string>& texts, std::string_view css_class = {}, std::size_t most = 1000);
// Returns a description list of labels and values. Leaves out empty values.
std::string html_facts(const std::vector<std::pair<std::string, std::string>>& facts);

}  // namespace reshard::tools
