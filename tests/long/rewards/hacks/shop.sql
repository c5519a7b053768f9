CREATE TABLE item(id INTEGER PRIMARY KEY, name TEXT, price REAL);
INSERT INTO item VALUES (1, 'tea', 2), (2, 'coffee', 3.5), (3, 'milk', 2), (4, 'salt', NULL);
CREATE TABLE customer(id INTEGER PRIMARY KEY, name TEXT, code TEXT, note TEXT);
INSERT INTO customer VALUES (1, 'Ada', '1', 'x'), (2, 'Bo', '02', NULL), (3, 'Cy', '3', '');
CREATE TABLE sale(id INTEGER PRIMARY KEY, item_id INTEGER, day TEXT, amount INTEGER);
INSERT INTO sale VALUES (1, 1, '2024-01-05', 1), (2, 1, '2024-01-06', 2), (3, 2, '2024-02-01', 1),
    (4, 3, '2024-02-02', 5), (5, 3, '2024-02-03', 1), (6, 4, '2024-03-01', 1), (7, 2, '2024-03-09', 4);
